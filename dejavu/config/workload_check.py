"""What the group ``workload`` must satisfy. Pure: reads no file."""

from __future__ import annotations

from dejavu.config.bounds import at_least, check_seed, refuse
from dejavu.config.schema import BadLines, WorkloadConfig, WorkloadKind
from dejavu.errors import ConfigError

_MOST_SIGMA = 4.0
_MOST_TOKENS = 10**9


def check_workload(workload: WorkloadConfig, *, least_new_tokens: int) -> None:
    """The workload makes sense; ``least_new_tokens`` may be asked for. Raises ConfigError naming key and value."""
    kind = workload.kind
    if kind in (WorkloadKind.file, WorkloadKind.trace):
        if not workload.path:
            raise ConfigError(f"workload={kind.value} needs workload.path=FILE")
    elif workload.path is not None:
        raise refuse(
            "workload.path",
            workload.path,
            f"is for workload=file and workload=trace, and the choice is workload={kind.value}",
        )
    at_least("workload.num_requests", workload.num_requests, 1)
    at_least("workload.prompt_tokens", workload.prompt_tokens, 1)
    at_least("workload.max_tokens", workload.max_tokens, least_new_tokens)
    for key in ("prompt_tokens", "max_tokens"):
        value: int | None = getattr(workload, key)
        if value is not None and value > _MOST_TOKENS:
            raise refuse(f"workload.{key}", value, f"must be at most {_MOST_TOKENS}")
    at_least("workload.rate", workload.rate, 0, " requests/s (0: all at once)")
    check_seed("workload.seed", workload.seed)
    for key in _needed_keys(kind):
        if getattr(workload, key) is None:
            raise ConfigError(f"workload.{key}=null: workload={kind.value} needs a number")
    if workload.prompt_tokens is not None and kind in (WorkloadKind.chat, WorkloadKind.file):
        raise refuse("workload.prompt_tokens", workload.prompt_tokens, "is for workload=synthetic and workload=trace")
    _check_distribution(workload)


def _check_distribution(workload: WorkloadConfig) -> None:
    at_least("workload.median_tokens", workload.median_tokens, 1, " token")
    if not 0 <= workload.sigma <= _MOST_SIGMA:
        raise refuse("workload.sigma", workload.sigma, f"must be from 0 to {_MOST_SIGMA}")
    if workload.sigma and workload.median_tokens is None:
        raise refuse("workload.sigma", workload.sigma, "needs workload.median_tokens")
    if workload.median_tokens is not None and workload.kind is not WorkloadKind.synthetic:
        raise refuse("workload.median_tokens", workload.median_tokens, "is for workload=synthetic and lmsys-like")
    if workload.bad_lines is not BadLines.refuse and workload.kind is not WorkloadKind.trace:
        raise refuse("workload.bad_lines", workload.bad_lines.value, "is for workload=trace")


def _needed_keys(kind: WorkloadKind) -> tuple[str, ...]:
    """Keys that may not be null for this kind of workload."""
    if kind is WorkloadKind.trace:
        return ()
    if kind is WorkloadKind.synthetic:
        return ("num_requests", "prompt_tokens", "max_tokens", "rate")
    return ("max_tokens", "rate")
