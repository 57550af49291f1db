"""Comparisons of recoveries that cannot be made are refused before anything starts, with the remedy."""

from __future__ import annotations

import pytest

from dejavu.config import RecoveryCase, RecoveryFigure
from dejavu.errors import ConfigError

from harness.cluster_kit import configured


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        configured(*overrides)
    message = str(refused.value)
    assert len(message.splitlines()) <= 3
    return message


def test_fig14_kills_a_stage_late_in_every_way_to_recover() -> None:
    config = configured("experiment=fig14")
    assert config.comparison.figure is RecoveryFigure.fig14
    assert config.comparison.cases == list(RecoveryCase)
    ((worker, step),) = [(fault.worker, fault.step or 0) for fault in config.fault.kill]
    assert worker == "w2"
    assert config.workload.max_tokens is not None
    assert config.workload.max_tokens / 2 < step < config.workload.max_tokens
    assert (config.strategy.replication, config.strategy.standby, config.strategy.stages) == (1, 1, 4)


def test_fig04_compares_no_failure_with_a_restart_alone() -> None:
    assert configured("experiment=fig04").comparison.cases == [RecoveryCase.none, RecoveryCase.restart]


def test_fig15_kills_three_workers_one_after_the_other() -> None:
    times_s = [fault.at_s or 0.0 for fault in configured("experiment=fig15").fault.kill]
    assert len(times_s) == 3
    assert times_s == sorted(times_s)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("comparison.cases=[replica,restart]", "comparison.cases lacks none, which fig14 compares"),
        ("comparison.cases=[none,restart]", "lacks replica"),
        ("comparison.cases=[none,replica,replica]", "names one twice"),
        ("comparison.repeats=0", "at least 1 round"),
        ("comparison.microbatch=4", "comparison.microbatch=4: must be from 0 to 3"),
        ("comparison.microbatch=-1", "comparison.microbatch=-1"),
        ("workload.num_requests=4", None),
        ("fault.kill=[]", "workflow=recovery needs a fault"),
        ("strategy.recovery=restart", "comparison.cases decides"),
        ("strategy.replication=0", "the case replica of workflow=recovery needs at least 1"),
        ("strategy.scheduling=row", "strategy.scheduling=microbatch"),
        ("workload.rate=2", "workload.rate=0"),
        ("workload.ignore_eos=false", "workload.ignore_eos=true"),
    ],
)
def test_what_would_not_be_compared_as_declared_is_refused(override: str, words: str | None) -> None:
    if words is None:
        configured("experiment=fig14", override)
    else:
        assert words in refusal("experiment=fig14", override)


def test_the_microbatch_shown_must_have_requests() -> None:
    message = refusal("experiment=fig14", "workload.num_requests=4", "comparison.microbatch=1")
    assert "its requests begin at number 4, and workload.num_requests=4" in message


def test_keys_of_a_comparison_are_refused_where_nothing_is_compared() -> None:
    assert "is for workflow=recovery" in refusal("comparison.repeats=7")
