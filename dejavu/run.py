"""The command ``python -m dejavu.run``: a declaration in, one workflow run, an exit code out.

Exit codes: 0 done; 1 the run failed; 2 the declaration is wrong; 3 it cannot be met; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dejavu.cli.interruption import Interruption
from dejavu.clock import SystemClock


def main() -> None:
    """The process ends with the command's exit code; no traceback reaches the terminal."""
    interruption = Interruption(SystemClock())
    interruption.install()
    try:
        code = run(sys.argv[1:], interruption)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = 130
    interruption.retire()
    sys.exit(code)


def run(argv: Sequence[str], interruption: Interruption) -> int:
    """The exit code of the command line ``argv``. Raises KeyboardInterrupt when interrupted."""
    # Imported here so that Ctrl-C is orderly from the first moment on.
    from dejavu.cli.command import run_command

    return run_command(argv, interruption)


if __name__ == "__main__":
    main()
