"""``strategy.swapping=auto``: which requests, times and bytes the rule is asked with, and what is said of it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from dejavu.config import Config
from dejavu.control.memory import stage_memory
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.ids import FIRST_EPOCH
from dejavu.planning.shape import ModelShape
from dejavu.planning.times import Times
from dejavu.report.progress import SilentProgress
from dejavu.workflows import swap_decision
from dejavu.workflows.declared_times import times
from dejavu.workflows.preparation import cluster_model, declared, prepare, prepare_service
from dejavu.workflows.swap_decision import with_swapping

from harness.cluster_kit import configured
from harness.oracle import ragged_requests
from harness.plans import made_up_spec

AUTO = (
    "strategy=colocated", "strategy.stages=2", "strategy.in_flight=4", "strategy.microbatch.token=8",
    "strategy.swapping=auto",
)  # fmt: skip
TIMES = ("profile.prompt_time_s=1", "profile.token_time_s=1")
FAST_BUS, SLOW_BUS = "cluster.pcie_gbps=100", "cluster.pcie_gbps=1e-6"
REHEARSED = (
    "model=opt-66b", "model.compute=modelled", "profile=roofline-a100", "strategy=colocated", "strategy.stages=4",
    "strategy.in_flight=8", "strategy.microbatch.token=8", "strategy.swapping=auto", "cluster.device_memory_gb=80",
    "cluster.pcie_gbps=50", "workload=synthetic", "workload.num_requests=2",
)  # fmt: skip


def tight(plan: Plan) -> str:
    """Device memory for two microbatches of eight rows."""
    places = [found for worker in plan.workers if (found := plan.place_of(worker)) is not None]
    weights = max(stage_memory(plan, one).weight_bytes for one in places)
    row = plan.model.layout.row_bytes(max(len(one.stage.layers) for one in places))
    return f"cluster.device_memory_gb={(weights + 2 * 8 * row + 1) / 1e9}"


def tight_of(config: Config) -> str:
    model = cluster_model(config, SilentProgress())
    return tight(place(replace(declared(config), swapping=False), model, epoch=FIRST_EPOCH))


def decide(*overrides: str) -> Declared:
    config = configured(*AUTO, *overrides)
    return with_swapping(config, declared(config), made_up_spec(), ragged_requests(4))


@pytest.fixture(scope="module")
def small() -> str:
    return tight(place(declared(configured(*AUTO)), made_up_spec(), epoch=FIRST_EPOCH))


def test_auto_decides_from_declared_memory_times_and_bandwidth(small: str) -> None:
    assert not decide().swapping
    assert decide(small).swapping
    choice = decide(small, *TIMES, FAST_BUS)
    assert choice.swapping
    assert "the rule says that it pays (for requests of " in choice.swapping_reason


def test_where_it_does_not_pay_the_log_warns_before_the_start(small: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choice = decide(small, *TIMES, SLOW_BUS)
    assert choice.swapping
    assert "the rule says that it does not pay" in choice.swapping_reason
    assert "swapping will cost more than it gives" in caplog.text


def test_what_the_rule_lacks_is_named(small: str) -> None:
    unknown = decide(small, "profile=given").swapping_reason
    assert "unknown without the time of a step (profile) and the bandwidth" in unknown
    assert decide(small, "profile=given", FAST_BUS).swapping_reason.endswith("without the time of a step (profile)")
    assert "unknown without the bandwidth to the device" in decide(small, *TIMES).swapping_reason


def test_a_bandwidth_that_the_profile_has_measured_is_taken(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_bandwidth(config: Config, shape: ModelShape, rows: int) -> Times:
        return replace(times(config, shape, rows), copy_bytes_per_s=1e9)

    monkeypatch.setattr(swap_decision, "times", with_bandwidth)
    assert "the rule says that it pays" in decide(small, *TIMES).swapping_reason
    assert "does not pay" in decide(small, *TIMES, SLOW_BUS).swapping_reason


def test_a_service_asks_for_requests_as_long_as_they_may_be_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    serving = ("workflow=serve", "model=tiny-llama", "model.max_length=64", *AUTO, *TIMES)
    small = tight_of(configured(*serving))
    plan = prepare_service(configured(*serving, small, FAST_BUS), SilentProgress()).plan
    assert plan.swapping
    asked_for = "requests that fill model.max_length (32 + 32 tokens), since none is known yet; times: profile=given"
    assert f"the rule says that it pays (for {asked_for})" in plan.swapping_reason
    with caplog.at_level(logging.WARNING):
        slow = prepare_service(configured(*serving, small, SLOW_BUS), SilentProgress()).plan
    assert "the rule says that it does not pay" in slow.swapping_reason
    assert "swapping will cost more than it gives: 8 rows of 64 tokens" in caplog.text


def test_a_rehearsal_is_decided_by_the_kv_of_the_model_itself_and_not_by_its_smaller_cells() -> None:
    whole, smaller = (
        prepare(configured(*REHEARSED, f"model.kv_scale={scale}"), SilentProgress()).plan for scale in (1, 0.02)
    )
    assert whole.swapping
    assert "the rule says that it does not pay" in whole.swapping_reason
    assert smaller.model.layout.position_bytes < whole.model.layout.position_bytes / 20
    assert smaller.swapping_reason == whole.swapping_reason
