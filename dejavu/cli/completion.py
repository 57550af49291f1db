"""Completion in bash for ``python -m dejavu.run`` and for an installed command.

Hydra's own script knows ``python FILE.py`` and commands, not ``python -m``; the suggestions are Hydra's.
"""

from __future__ import annotations

_INSTALL = r"""
_dejavu_complete() {
  local rest word command
  case "$COMP_LINE" in
    *" -m dejavu.run "*) rest="${COMP_LINE#* -m dejavu.run }"; command=("${COMP_WORDS[0]}" -m dejavu.run) ;;
    "dejavu "*) rest="${COMP_LINE#dejavu }"; command=(dejavu) ;;
    *) return 1 ;;
  esac
  word="${COMP_LINE##* }"
  local choices
  choices="$(COMP_LINE="dejavu $rest" "${command[@]}" -sc query=bash 2>/dev/null)"
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
  # Bash splits words at '=' and ':' and then replaces only what follows them.
  local character
  for character in "=" ":"; do
    case "$COMP_WORDBREAKS" in
      *"$character"*)
        case "$word" in
          *"$character"*) COMPREPLY=("${COMPREPLY[@]#"${word%"$character"*}$character"}") ;;
        esac ;;
    esac
  done
}
complete -o nospace -o bashdefault -o default -F _dejavu_complete python python3 dejavu
"""

_UNINSTALL = """
complete -r python python3 dejavu 2>/dev/null
unset -f _dejavu_complete
"""


def bash_script(overrides: list[str]) -> str | None:
    """The script that ``-sc install=bash`` and ``-sc uninstall=bash`` print; None for anything else."""
    return {"install=bash": _INSTALL, "uninstall=bash": _UNINSTALL}.get(" ".join(overrides))
