"""Real engines answer for their meters while they serve, and nothing of their report is used up by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.engine import messages as m
from dejavu.report.counters import LiveFigures
from dejavu.serving.meters import amounts_of

from harness.local_cluster import LocalCluster, local_cluster
from harness.oracle import Oracle, ragged_requests


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def asked(cluster: LocalCluster) -> dict[str, LiveFigures]:
    answers = cluster.links.ask(m.AskMeters(epoch=cluster.plan.epoch), cluster.plan.workers, m.Meters, timeout_s=10.0)
    figures = {}
    for name, answer in answers.items():
        assert isinstance(answer.message, m.Meters)
        figures[name] = answer.message.figures
        answer.inbound.release()
    return figures


def test_meters_tell_of_work_rows_and_links_and_leave_the_report_whole(tmp_path: Path) -> None:
    oracle = Oracle.of("llama", tmp_path)
    requests = ragged_requests(6, seed=4)
    declared = Declared(
        mode="disaggregated",
        prompt_depth=1,
        token_depth=2,
        prompt_rows=2,
        token_rows=2,
        scheduling="row",
        timeout_s=30.0,
        replication=1,
    )
    during: dict[str, LiveFigures] = {}
    with local_cluster(declared, oracle.spec) as cluster:
        cluster.at_step(0, 3, lambda: during.update(asked(cluster)))
        completions = cluster.serve(requests)
        after, reported = asked(cluster), cluster.counters()
        prompt, first, _ = cluster.plan.workers
    assert {name: line.tokens for name, line in completions.items()} == oracle.all_tokens(requests)
    assert sum(during[first].rows.values()) >= 1
    assert 0 < during[first].kv_used_bytes["device"] < during[first].kv_room_bytes["device"]
    assert during[first].kv_used_bytes["replica"] > 0
    assert during[prompt].sent_bytes[first] > 0
    assert during[prompt].rows == {}
    for name, figures in after.items():
        later, earlier = amounts_of(figures.counters), amounts_of(during[name].counters)
        assert all(later[key] >= earlier[key] for key in later)
        assert figures.at_s > during[name].at_s
        assert amounts_of(reported[name]) == later
