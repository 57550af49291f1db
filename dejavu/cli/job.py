"""One job of a command: its workflow runs, and whatever happens becomes an exit code and at most three lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dejavu import workflows
from dejavu.cli.terminal import TOLD
from dejavu.clock import Clock
from dejavu.config import Config, load
from dejavu.errors import ConfigError, DejavuError, InfeasibleError

logger = logging.getLogger(__name__)


class ExitCode(IntEnum):
    """What the process tells its caller."""

    DONE = 0
    FAILED = 1
    WRONG_CONFIG = 2
    INFEASIBLE = 3
    INTERRUPTED = 130

    def severity(self) -> int:
        """Orders the codes of a sweep's jobs: the worst one is the sweep's."""
        order = (ExitCode.DONE, ExitCode.WRONG_CONFIG, ExitCode.INFEASIBLE, ExitCode.FAILED, ExitCode.INTERRUPTED)
        return order.index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How one job ended."""

    number: int
    """Of a sweep's point, from 0."""
    overrides: tuple[str, ...]
    output: Path
    code: ExitCode
    reason: str = ""
    """Of a failure: what the person was told."""
    took_s: float


def tell(message: str) -> None:
    """The message stands on the terminal as an error."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()


def run_job(
    tree: DictConfig,
    check: Callable[[Config], None],
    *,
    interrupted: Callable[[], bool],
    begun: Callable[[int, tuple[str, ...]], None],
    clock: Clock,
) -> JobEnd:
    """How the declared workflow ended. A failure is in ``run.log`` with its traceback, and on the terminal without.

    Args:
        tree: the declaration without the ``hydra`` node; called inside a Hydra job.
        check: raises ConfigError for a declaration that cannot be run.
        interrupted: whether the user has ended the program.
        begun: told of the number and the overrides of a sweep's point before it runs.
        clock: for the time it took.
    """
    hydra = HydraConfig.get()
    in_sweep = hydra.mode == RunMode.MULTIRUN
    number, overrides = (hydra.job.num if in_sweep else 0), tuple(hydra.overrides.task)
    if in_sweep:
        begun(number, overrides)
    start_s = clock.monotonic()
    code, reason = _run(tree, check, interrupted, f"job {number} ({' '.join(overrides)}): " if in_sweep else "")
    return JobEnd(
        number=number,
        overrides=overrides,
        output=Path(hydra.runtime.output_dir),
        code=code,
        reason=reason,
        took_s=clock.monotonic() - start_s,
    )


def _run(
    tree: DictConfig, check: Callable[[Config], None], interrupted: Callable[[], bool], job: str
) -> tuple[ExitCode, str]:
    """Exit code, and of a failure the reason, which the person was told after ``job``."""
    hydra = HydraConfig.get()
    output = Path(hydra.runtime.output_dir)
    try:
        config = load(tree, Path(hydra.runtime.cwd), hydra.overrides.task)
        check(config)
        code = workflows.entry(config.workflow.name.value)(config, output)
        return (ExitCode.DONE if code is None else ExitCode(code)), ""
    except KeyboardInterrupt:
        logger.info("interrupted", extra={TOLD: True})
        return ExitCode.INTERRUPTED, "interrupted"
    # The one place where an unforeseen error has to become an exit code and a line for a person.
    except Exception as error:
        if interrupted():
            # A library may turn the interrupt into an error of its own, as extension modules do while they load.
            logger.info("interrupted", exc_info=True, extra={TOLD: True})
            return ExitCode.INTERRUPTED, "interrupted"
        return _failure(error, job, output / f"{hydra.job.name}.log")


def _failure(error: Exception, job: str, log_path: Path) -> tuple[ExitCode, str]:
    """The exit code of ``error`` and its message, which is told to the person and logged whole."""
    message = str(error)
    match error:
        case ConfigError():
            code = ExitCode.WRONG_CONFIG
        case InfeasibleError():
            code = ExitCode.INFEASIBLE
        case DejavuError():
            code = ExitCode.FAILED
            message = f"{message}\nlog: {log_path}"
        case _:
            code = ExitCode.FAILED
            first_line = str(error).partition("\n")[0]
            message = f"unexpected {type(error).__name__}: {first_line}\nwith its traceback in {log_path}"
    logger.error("%s%s", job, message, exc_info=error, extra={TOLD: True})
    tell(f"{job}{message}")
    return code, message
