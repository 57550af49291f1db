"""What a declaration must satisfy for ``workflow=recovery``, which runs a workload with and without faults. Pure."""

from __future__ import annotations

from dejavu.config.fault import FaultConfig
from dejavu.config.schema import (
    ComparisonConfig,
    Config,
    RecoveryCase,
    RecoveryFigure,
    WorkflowName,
    WorkloadConfig,
    WorkloadKind,
)
from dejavu.config.strategy import Recovery, Scheduling
from dejavu.errors import ConfigError

_NEEDED = {
    RecoveryFigure.fig04: (RecoveryCase.none, RecoveryCase.restart),
    RecoveryFigure.fig14: (RecoveryCase.none, RecoveryCase.replica),
    RecoveryFigure.fig15: (RecoveryCase.none, RecoveryCase.replica, RecoveryCase.restart),
}
_ADVICE = "experiment=fig04, fig14 and fig15 set what the comparison needs"


def check_comparison(config: Config) -> None:
    """The comparison is one that can be made, or there is none. Raises ConfigError naming key, value and limit."""
    comparison = config.comparison
    if config.workflow.name is not WorkflowName.recovery:
        if comparison != ComparisonConfig():
            raise ConfigError(f"comparison is for workflow=recovery, and the choice is {config.workflow.name.value}")
        return
    _check_cases(comparison)
    if config.fault == FaultConfig():
        raise ConfigError(f"workflow=recovery needs a fault, such as fault.kill=[{{worker: w1, step: 20}}]\n{_ADVICE}")
    if config.strategy.recovery is not Recovery.replica:
        raise ConfigError(f"strategy.recovery={config.strategy.recovery.value}: comparison.cases decides")
    if RecoveryCase.replica in comparison.cases and config.strategy.replication == 0:
        raise ConfigError("strategy.replication=0: the case replica of workflow=recovery needs at least 1")
    _check_workload(config.workload)
    if comparison.figure is not RecoveryFigure.fig15:
        _check_microbatch(config)


def _check_cases(comparison: ComparisonConfig) -> None:
    cases = comparison.cases
    if len(set(cases)) < len(cases):
        raise ConfigError("comparison.cases names one twice; comparison.repeats runs them again")
    for case in _NEEDED[comparison.figure]:
        if case not in cases:
            raise ConfigError(f"comparison.cases lacks {case.value}, which {comparison.figure.value} compares")
    if comparison.repeats < 1:
        raise ConfigError(f"comparison.repeats={comparison.repeats}: must be at least 1 round")


def _check_workload(workload: WorkloadConfig) -> None:
    # Answers of one length: otherwise the end of the run would hang on a single long one.
    if workload.kind is not WorkloadKind.synthetic or not workload.ignore_eos:
        raise ConfigError(f"workflow=recovery needs workload=synthetic and workload.ignore_eos=true\n{_ADVICE}")
    if workload.median_tokens is not None:
        raise ConfigError(f"workload.median_tokens={workload.median_tokens:g}: workflow=recovery needs equal answers")


def _check_microbatch(config: Config) -> None:
    """Fig. 15 counts requests; the others show a microbatch, which must be there, and filled in order."""
    comparison, strategy, num_requests = config.comparison, config.strategy, config.workload.num_requests
    if strategy.scheduling is not Scheduling.microbatch or config.workload.rate:
        raise ConfigError(
            f"comparison.figure={comparison.figure.value} shows a microbatch: strategy.scheduling=microbatch and "
            f"workload.rate=0\n{_ADVICE}"
        )
    if not 0 <= comparison.microbatch < strategy.num_in_flight:
        raise ConfigError(
            f"comparison.microbatch={comparison.microbatch}: must be from 0 to {strategy.num_in_flight - 1}, those in "
            "flight (strategy.in_flight)"
        )
    rows = strategy.microbatch.token
    if num_requests is not None and comparison.microbatch * rows >= num_requests:
        raise ConfigError(
            f"comparison.microbatch={comparison.microbatch}: its requests begin at number "
            f"{comparison.microbatch * rows}, and workload.num_requests={num_requests}"
        )
