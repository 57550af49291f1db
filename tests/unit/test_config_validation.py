"""A declaration that makes no sense is refused with key, value and limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dejavu.config import (
    BadLines,
    Config,
    Device,
    ProfileKind,
    ShapeConfig,
    StoreKind,
    StrategyMode,
    WorkflowName,
    WorkloadKind,
    check_paths,
    validate,
)
from dejavu.config.fault import KillFault
from dejavu.errors import ConfigError

Change = Callable[[Config], None]


def valid() -> Config:
    """A declaration without a fault."""
    config = Config()
    config.workload.max_tokens = 8
    return config


def put(key: str, value: object) -> Change:
    """A change of one key."""

    def change(config: Config) -> None:
        *groups, name = key.split(".")
        node: object = config
        for group in groups:
            node = getattr(node, group)
        assert hasattr(node, name)
        setattr(node, name, value)

    return change


def refusal(*changes: Change) -> str:
    """What ``validate`` says; it never has more than three lines."""
    config = valid()
    for change in changes:
        change(config)
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def test_the_schemas_defaults_are_valid() -> None:
    validate(valid())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.name", "a/b"),
        ("cluster.host", "a b"),
        ("cluster.num_workers", 0),
        ("cluster.threads_per_worker", 0),
        ("cluster.device_memory_gb", 0.0),
        ("cluster.device_memory_gb", math.nan),
        ("cluster.host_memory_gb", 0.0),
        ("cluster.lease_ttl_s", 1),
        ("cluster.start_timeout_s", math.inf),
        ("model.kind", "tiny-gpt3"),
        ("model.path", "x"),
        ("model.name", "x"),
        ("model.max_length", 1),
        ("model.num_layers", 2),
        ("model.seed", -1),
        ("strategy.split.prompt", 0),
        ("strategy.split.token", -1),
        ("strategy.stages", 2),
        ("strategy.microbatch.prompt", 0),
        ("strategy.microbatch.token", 0),
        ("strategy.in_flight", 0),
        ("strategy.layers.colocated", [[0, 2]]),
        ("strategy.layers.prompt", [[0, 2], [2, 4]]),
        ("strategy.layers.token", [[1, 2]]),
        ("strategy.layers.token", [[0, 0]]),
        ("strategy.layers.token", [[0]]),
        ("transport.settings", {"lower": "1"}),
        ("transport.timeout_s", 0.0),
        ("workload.path", "x"),
        ("workload.num_requests", 0),
        ("workload.prompt_tokens", 4),
        ("workload.max_tokens", 0),
        ("workload.max_tokens", None),
        ("workload.rate", -0.5),
        ("workload.rate", math.nan),
        ("workload.rate", None),
        ("workload.seed", 2**63),
        ("workload.sigma", 1.0),
        ("workload.sigma", math.nan),
        ("workload.median_tokens", 100.0),
        ("workload.bad_lines", BadLines.skip),
        ("cluster.num_machines", 0),
        ("cluster.devices_per_machine", 0),
        ("cluster.link_gbps", 0.0),
        ("cluster.pcie_gbps", math.nan),
        ("cluster.price_per_hour", -1.0),
        ("profile.prompt_time_s", -1.0),
        ("profile.prompt_time_s", 1.0),
        ("profile.streaming_overhead", 0.9),
        ("profile.tflops", 1.0),
        ("profile.compute_efficiency", 0.0),
        ("profile.path", "x"),
        ("model.shape", ShapeConfig(num_layers=3)),
        ("store.timeout_s", -1.0),
        ("store.endpoints", ["a:1"]),
        ("store.user", "me"),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_its_key(key: str, value: object) -> None:
    assert key in refusal(put(key, value))


def test_fewer_workers_than_stages_are_refused_with_both_numbers() -> None:
    message = refusal(put("cluster.num_workers", 2), put("strategy.split.prompt", 2))
    assert "cluster.num_workers=2" in message
    assert "3 workers (2 prompt + 1 token)" in message


def test_as_many_workers_as_stages_are_enough() -> None:
    config = valid()
    config.cluster.num_workers = 2
    validate(config)


def test_a_split_is_refused_where_the_strategy_is_colocated() -> None:
    message = refusal(put("strategy.mode", StrategyMode.colocated), put("strategy.split.prompt", 2))
    assert "strategy.split.prompt=2" in message
    assert "strategy.stages" in message


def test_uneven_layer_ranges_that_follow_each_other_are_accepted() -> None:
    config = valid()
    config.strategy.split.prompt = 2
    config.strategy.layers.prompt = [[0, 1], [1, 6]]
    validate(config)


@pytest.mark.parametrize("endpoint", ["localhost", "http://a:1", "a:0", "a:70000", "a:b", "a:1/x"])
def test_an_endpoint_that_is_not_host_and_port_is_refused(endpoint: str) -> None:
    message = refusal(put("store.kind", StoreKind.external), put("store.endpoints", [endpoint]))
    assert f"store.endpoints={endpoint}" in message


@pytest.mark.parametrize("endpoint", ["localhost:2379", "10.0.0.1:1", "[::1]:2379"])
def test_an_endpoint_of_host_and_port_is_accepted(endpoint: str) -> None:
    config = valid()
    config.store.kind = StoreKind.external
    config.store.endpoints = [endpoint]
    validate(config)


@pytest.mark.parametrize(("given", "missing"), [("cert", "key"), ("key", "cert"), ("user", "password")])
def test_half_of_a_pair_of_the_store_is_refused(given: str, missing: str) -> None:
    external = (put("store.kind", StoreKind.external), put("store.endpoints", ["a:1"]))
    message = refusal(*external, put(f"store.{given}", "x"))
    assert f"store.{missing}" in message


def test_an_external_store_without_endpoints_is_refused_with_an_example() -> None:
    assert "store.endpoints=[HOST:PORT" in refusal(put("store.kind", StoreKind.external))


def test_synthetic_requests_need_their_three_numbers() -> None:
    assert "workload.num_requests" in refusal(put("workload.kind", WorkloadKind.synthetic))


def test_a_trace_may_leave_its_numbers_open() -> None:
    config = valid()
    config.workload.kind = WorkloadKind.trace
    config.workload.path = "t.csv"
    config.workload.rate = config.workload.max_tokens = None
    validate(config)


def test_key_heads_must_divide_heads() -> None:
    message = refusal(put("model.kind", "tiny-llama"), put("model.num_heads", 4), put("model.num_kv_heads", 3))
    assert "model.num_kv_heads=3" in message
    assert "model.num_heads=4" in message


def test_cuda_is_accepted_without_looking_for_a_device() -> None:
    config = valid()
    config.cluster.device = Device.cuda
    validate(config)


def test_a_missing_folder_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    config = valid()
    config.model.path = str(tmp_path / "my-modle" / "deeper")
    with pytest.raises(ConfigError, match=r"no such folder\n.*did you mean 'my-model'"):
        check_paths(config)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    config = valid()
    config.model.path = str(tmp_path / "model")
    with pytest.raises(ConfigError, match="is a file"):
        check_paths(config)


def test_a_missing_certificate_is_refused_with_its_key(tmp_path: Path) -> None:
    config = valid()
    config.store.ca_cert = str(tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match=r"store\.ca_cert=.*no such file"):
        check_paths(config)


def test_of_two_times_both_must_be_given() -> None:
    assert "without profile.token_time_s" in refusal(put("profile.prompt_time_s", 1.0))
    config = valid()
    config.profile.prompt_time_s = config.profile.token_time_s = 1.0
    validate(config)
    assert config.profile.effective_kind is ProfileKind.given


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (ProfileKind.given, "prompt_time_s"),
        (ProfileKind.measured, "path"),
        (ProfileKind.published, "hardware"),
        (ProfileKind.roofline, "hardware"),
    ],
)
def test_a_plan_needs_what_its_profile_is_made_of(kind: ProfileKind, missing: str) -> None:
    message = refusal(put("workflow.name", WorkflowName.plan), put("profile.kind", kind))
    assert f"profile={kind.value} needs profile.{missing}" in message


def test_a_plan_takes_no_faults() -> None:
    config = valid()
    config.workflow.name = WorkflowName.plan
    config.profile.prompt_time_s = config.profile.token_time_s = 1.0
    config.fault.kill = [KillFault(worker="w0", step=1)]
    with pytest.raises(ConfigError, match="fault is for"):
        validate(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_layers", 0), ("num_heads", 3), ("num_kv_heads", 5), ("feed_forward_matrices", 4), ("vocab_size", 0)],
)
def test_sizes_that_make_no_model_are_refused(key: str, value: int) -> None:
    shape = ShapeConfig(num_layers=2, hidden_size=8, num_heads=4, feed_forward_size=16, vocab_size=10)
    setattr(shape, key, value)
    message = refusal(put("model.kind", "shape"), put("model.shape", shape))
    assert f"model.shape.{key}={value}" in message
