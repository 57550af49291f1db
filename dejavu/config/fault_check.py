"""What the group ``fault`` must satisfy: every fault strikes a worker that there is, at one moment. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dejavu.config.fault import FAULT_PHASES, FaultConfig, FaultEntry
from dejavu.config.strategy import StrategyConfig
from dejavu.errors import ConfigError, nearest

_TRIGGERS = ("step", "at_s", "phase")
_MOST_LISTED = 16


def check_faults(faults: FaultConfig, strategy: StrategyConfig, *, replicas: int = 1) -> None:
    """Every fault can happen. Raises ConfigError naming key, value and what is allowed, of the first that cannot.

    ``replicas``: sets of the strategy's workers, numbered one set after the other.
    """
    workers = [f"w{number}" for number in range(strategy.num_workers * replicas)]
    entries: dict[str, Sequence[FaultEntry]] = {
        "kill": faults.kill,
        "stop": faults.stop,
        "partition": faults.partition,
        "slow": faults.slow,
    }
    for kind, listed in entries.items():
        for number, entry in enumerate(listed):
            _check_entry(f"fault.{kind}[{number}]", entry, workers, strategy.num_in_flight)
    for number, stop in enumerate(faults.stop):
        _check_seconds(f"fault.stop[{number}].for_s", stop.for_s, above_zero=True)
    for number, partition in enumerate(faults.partition):
        key = f"fault.partition[{number}].for_s"
        if partition.for_s is None:
            raise ConfigError(f"{key}=null: a partition needs an end, for_s=SECONDS")
        _check_seconds(key, partition.for_s, above_zero=True)
    for number, slow in enumerate(faults.slow):
        key = f"fault.slow[{number}].delay_s"
        if slow.delay_s is None:
            raise ConfigError(f"{key}=null: say how slow, delay_s=SECONDS; 0 makes it fast again")
        _check_seconds(key, slow.delay_s)


def _check_entry(key: str, entry: FaultEntry, workers: Sequence[str], num_microbatches: int) -> None:
    if not entry.worker:
        valid = ", ".join(workers) if len(workers) <= _MOST_LISTED else f"{workers[0]} to {workers[-1]}"
        raise ConfigError(f"{key} names no worker: {{worker: {workers[-1]}, step: 20}}\nvalid: {valid}")
    if entry.worker not in workers:
        raise ConfigError(f"{key}.worker={entry.worker}: no such worker\n{nearest(entry.worker, workers)}")
    given = [name for name in _TRIGGERS if getattr(entry, name) is not None]
    if len(given) != 1:
        has = " and ".join(given) or "none"
        raise ConfigError(f"{key} needs exactly one of step, at_s and phase, and has {has}")
    if entry.step is not None and entry.step < 1:
        raise ConfigError(f"{key}.step={entry.step}: must be at least 1, the first step")
    _check_microbatch(key, entry, num_microbatches)
    _check_seconds(f"{key}.at_s", entry.at_s)
    if entry.phase is not None and entry.phase not in FAULT_PHASES:
        raise ConfigError(f"{key}.phase={entry.phase}: no such phase\n{nearest(entry.phase, FAULT_PHASES)}")


def _check_microbatch(key: str, entry: FaultEntry, num_microbatches: int) -> None:
    if entry.microbatch is None:
        return
    if entry.step is None:
        raise ConfigError(f"{key}.microbatch={entry.microbatch}: goes with step")
    if not 0 <= entry.microbatch < num_microbatches:
        raise ConfigError(
            f"{key}.microbatch={entry.microbatch}: must be from 0 to {num_microbatches - 1}: "
            f"{num_microbatches} are in flight (strategy.in_flight)"
        )


def _check_seconds(key: str, seconds: float | None, *, above_zero: bool = False) -> None:
    """Raises ConfigError for a time that is negative (or 0, where that makes no sense) or not finite; None passes."""
    if seconds is None:
        return
    if not math.isfinite(seconds) or seconds < 0 or (above_zero and seconds == 0):
        raise ConfigError(f"{key}={seconds:g}: must be {'more than' if above_zero else 'at least'} 0 s")
