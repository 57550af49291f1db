"""Completion in bash for ``python -m dejavu.run`` and for an installed command.

Hydra's own script knows ``python FILE.py`` and commands, not ``python -m``; the suggestions are Hydra's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dejavu.errors import ConfigError

SHELLS = ("bash", "fish", "zsh")
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


def check_request(overrides: Sequence[str], environment: Mapping[str, str]) -> None:
    """What follows ``-sc`` can be answered. Raises ConfigError otherwise."""
    command, _, shell = overrides[0].partition("=") if len(overrides) == 1 else ("", "", "")
    if command not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise ConfigError(f"-sc takes install=SHELL or uninstall=SHELL\nSHELL is one of {', '.join(SHELLS)}")
    if command == "query" and "COMP_LINE" not in environment:
        raise ConfigError("-sc query is asked by the shell, which sets COMP_LINE")


def bash_script(overrides: Sequence[str]) -> str | None:
    """The script that ``-sc install=bash`` and ``-sc uninstall=bash`` print; None for anything else."""
    return {"install=bash": _INSTALL, "uninstall=bash": _UNINSTALL}.get(" ".join(overrides))
