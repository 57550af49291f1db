"""``/state``, ``/metrics`` and the page, on a cluster that is made up."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dejavu.api.page import operations_routes, page_html
from dejavu.ids import RequestId
from dejavu.report.cluster_status import ABSENT
from dejavu.request import Completion
from dejavu.serving.tally import Counts
from dejavu.serving.view import UNKNOWN

from harness.view_kit import MadeUpCluster, repaired


def got(cluster: MadeUpCluster, path: str) -> str:
    (route,) = [route for route in operations_routes(cluster.view()) if route.path == path]
    response = route.endpoint(None)
    assert response.status_code == 200
    return bytes(response.body).decode()


def state(cluster: MadeUpCluster) -> dict[str, Any]:
    return dict(json.loads(got(cluster, "/state")))


def samples(cluster: MadeUpCluster) -> dict[str, dict[tuple[str, ...], float]]:
    """By name: values by the labels' values, in the order of the labels' names."""
    made: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(got(cluster, "/metrics")):
        for sample in family.samples:
            made.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return made


def test_the_state_tells_each_places_worker_and_what_it_said_last() -> None:
    cluster = MadeUpCluster(states={"w0": "serving", "w1": "ready"})
    cluster.answer("w1", 10.0, 1.0)
    cluster.answer("w1", 12.0, 2.0, sent=5000, steps=7)
    told = state(cluster)
    prompt, token = told["pipelines"]
    assert [(one["worker"], one["state"]) for one in token["stages"]] == [("w1", "ready"), ("w2", ABSENT)]
    first = token["stages"][0]
    assert (first["busy_share"], first["rows"], first["steps"]) == (0.5, {"0": 2, "1": 1}, 7)
    assert {"to": "w2", "bytes_per_s": 2500.0, "total_bytes": 5000} in first["links"]
    assert prompt["stages"][0]["busy_share"] is None


def test_what_was_said_in_a_former_epoch_or_by_a_worker_that_is_gone_is_not_told() -> None:
    cluster = MadeUpCluster(states={"w0": "serving"})
    cluster.answer("w0", 10.0, 1.0, steps=5)
    cluster.answer("w1", 10.0, 1.0, steps=5)
    prompt, token = state(cluster)["pipelines"]
    assert (prompt["stages"][0]["steps"], token["stages"][0]["steps"]) == (5, None)
    cluster.enter(2)
    assert state(cluster)["pipelines"][0]["stages"][0]["steps"] is None


def test_states_are_unknown_while_the_store_is_away() -> None:
    stages = [one for pipeline in state(MadeUpCluster(states=None))["pipelines"] for one in pipeline["stages"]]
    assert {one["state"] for one in stages} == {UNKNOWN}


def test_the_last_repairs_come_first_and_all_are_counted() -> None:
    told = state(MadeUpCluster(journals=[repaired(number) for number in range(1, 14)]))
    assert told["num_repairs"] == 13
    assert [one["receipt"]["number"] for one in told["repairs"]] == list(range(13, 3, -1))
    assert "a new process took its place" in told["repairs"][0]["line"]


def test_the_metrics_add_up() -> None:
    counts = Counts(
        submitted=15,
        finished=7,
        aborted=2,
        rejected=1,
        failed=1,
        queued=3,
        running=1,
        generated_tokens=70,
        prompt_tokens=9,
    )
    made = samples(MadeUpCluster(counts=counts))
    outcomes = made["dejavu_requests_total"]
    assert outcomes[("a-model", "finished")] == 7
    (running,), (waiting,) = made["dejavu_num_requests_running"].values(), made["dejavu_num_requests_waiting"].values()
    assert made["dejavu_requests_submitted_total"][("a-model",)] == sum(outcomes.values()) + running + waiting == 15
    assert made["dejavu_generation_tokens_total"][("a-model",)] == 70
    assert made["dejavu_prompt_tokens_total"][("a-model",)] == 9


def test_a_histogram_is_cumulative_and_ends_with_its_count() -> None:
    cluster = MadeUpCluster()
    line = Completion(
        id=RequestId("r"),
        prompt_tokens=3,
        tokens=(1, 2, 3),
        text="",
        finish_reason="length",
        arrival_s=1.0,
        first_token_s=1.03,
        end_s=1.9,
    )
    cluster.latencies.ended(line, (1.03, 1.4, 1.9))
    made = samples(cluster)
    first = made["dejavu_time_to_first_token_seconds_bucket"]
    assert (first[("0.02", "a-model")], first[("0.04", "a-model")], first[("+Inf", "a-model")]) == (0, 1, 1)
    assert made["dejavu_time_to_first_token_seconds_sum"][("a-model",)] == pytest.approx(0.03)
    assert made["dejavu_time_per_output_token_seconds_count"][("a-model",)] == 2
    assert made["dejavu_e2e_request_latency_seconds_sum"][("a-model",)] == pytest.approx(0.9)


def test_counters_of_a_worker_that_died_are_not_lost_and_never_decrease() -> None:
    cluster = MadeUpCluster(states={"w0": "serving", "w1": "serving"})
    cluster.answer("w1", 10.0, 4.0, steps=100, sent=1000)
    before = samples(cluster)
    cluster.states = {"w0": "serving"}
    cluster.enter(2)
    gone = samples(cluster)
    cluster.answer("w1", 1.0, 1.0, incarnation="j", steps=10, sent=50)
    after = samples(cluster)
    for name in (name for name in before if name.endswith("_total") or name.endswith("_count")):
        for labels, value in before[name].items():
            assert value <= gone[name][labels] <= after[name][labels], name
    assert after["dejavu_steps_total"][("w1",)] == 110
    assert after["dejavu_kv_streamed_bytes_total"][("w1",)] == 5_000_000
    assert after["dejavu_kv_replicated_bytes_total"][("w1",)] == 10_000_000
    assert after["dejavu_link_sent_bytes_total"][("w2", "w1")] == 1050


def test_gauges_of_stages_are_those_of_the_plan_in_force() -> None:
    cluster = MadeUpCluster(states={"w0": "serving"}, journals=[repaired(1)], not_ready="a repair is under way")
    cluster.enter(3)
    cluster.answer("w0", 1.0, 0.0)
    made = samples(cluster)
    assert made["dejavu_stage_up"] == {("prompt", "0", "w0"): 1, ("token", "0", "w1"): 0, ("token", "1", "w2"): 0}
    assert made["dejavu_kv_cache_used_bytes"][("prompt", "device", "0", "w0")] == 3000
    assert made["dejavu_kv_cache_room_bytes"] == {("prompt", "device", "0", "w0"): 10_000}
    singles = {name: made[name][()] for name in ("dejavu_epoch", "dejavu_ready", "dejavu_repairs_total", "dejavu_rows")}
    assert singles == {"dejavu_epoch": 3, "dejavu_ready": 0, "dejavu_repairs_total": 1, "dejavu_rows": 4}


def test_the_page_is_one_file_that_asks_nobody_but_its_own_server() -> None:
    html = page_html()
    assert got(MadeUpCluster(), "/") == html
    addresses = re.findall(r"https?://[^\s\"']+", html)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"(?:src|href)=\"([^\"]+)\"", html)) == {"data:,", "state", "metrics"}
    assert "innerHTML" not in html
