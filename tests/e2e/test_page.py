"""The page of a real service in a real browser, while a worker is killed; metrics and etcd tell the same."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Browser, browsing, find_chromium
from prometheus_client.parser import text_string_to_metric_families
from served import PATIENCE_S, Served, served

from dejavu.store import StoreClient
from dejavu.store.keys import Keys
from dejavu.store.spec import StoreSpec
from dejavu.workflows.status import read_status

SERVING = "document.querySelectorAll('[data-state=serving]').length"
SEEN = """
window.seen = [];
new MutationObserver(() => {
  const now = document.getElementById("ready").textContent;
  if (seen.at(-1) !== now) seen.push(now);
}).observe(document.getElementById("ready"), { childList: true, characterData: true, subtree: true });
"""


def complete(service: Served, num_tokens: int) -> int:
    """The status of a request."""
    connection = http.client.HTTPConnection(service.address, timeout=PATIENCE_S)
    body = {"model": "tiny-llama", "prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


@contextmanager
def requests_going_on(service: Served) -> Iterator[list[int]]:
    """Two clients ask one request after the other; yields the statuses so far."""
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            statuses.append(complete(service, 60))

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield statuses
    finally:
        is_over.set()
        for client in clients:
            client.join()


def counters(service: Served) -> dict[str, float]:
    """Every counter by its name and labels."""
    families = text_string_to_metric_families(service.get("/metrics"))
    samples = [sample for family in families if family.type == "counter" for sample in family.samples]
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in samples}


def check_sums(service: Served) -> None:
    """At the end of all requests."""
    told = service.state()["requests"]
    ended = {name: told[name] for name in ("finished", "aborted", "rejected", "failed")}
    assert (told["queued"], told["running"]) == (0, 0)
    assert sum(ended.values()) == told["submitted"] == ended["finished"]
    totals = counters(service)
    assert totals["dejavu_requests_submitted_total[('model_name', 'tiny-llama')]"] == told["submitted"]
    assert totals["dejavu_repairs_total[]"] == 1


def kill_a_worker(page: Browser, service: Served) -> None:
    """The page says that a repair is under way, then what it was, and shows the new process."""
    old = service.state()["pipelines"][1]["stages"][1]["pid"]
    os.kill(old, signal.SIGKILL)
    page.wait_for("document.querySelector('[data-repair=\"1\"][data-phase=done]') !== null", PATIENCE_S)
    page.wait_for(f"{SERVING} === 3 && document.getElementById('ready').textContent === 'ready'", PATIENCE_S)
    assert any("repair is under way" in text for text in page.evaluate("window.seen"))
    told = page.evaluate("document.querySelector('[data-repair=\"1\"]').innerText")
    assert "killed by signal 9" in told
    assert "a new process took its place" in told
    new = service.state()["pipelines"][1]["stages"][1]["pid"]
    assert new != old
    assert f"process {new}" in page.evaluate("document.body.innerText")


@pytest.mark.slow
@pytest.mark.faults
def test_the_page_shows_a_worker_that_is_killed_its_repair_and_a_lost_connection(
    tmp_path: Path, nothing_left: None
) -> None:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium is installed (Debian package chromium)")
    words = ("model=tiny-llama", "strategy.split.token=2", "strategy.replication=1", "cluster.name=page")
    with served(tmp_path, *words) as service, browsing(chromium) as page:
        page.open(f"http://{service.address}/")
        page.wait_for(f"{SERVING} === 3", PATIENCE_S)
        page.evaluate(SEEN)
        with requests_going_on(service) as statuses:
            page.wait_for("document.querySelector('.squares .on') !== null", PATIENCE_S)
            before = counters(service)
            kill_a_worker(page, service)
        assert set(statuses) == {200}
        after = counters(service)
        assert [name for name in before if after[name] < before[name]] == []
        check_sums(service)
        status = read_status(StoreClient(StoreSpec(endpoints=(service.endpoint,))), Keys("page"))
        assert [stage.worker.state for line in status.pipelines for stage in line.stages] == ["serving"] * 3
        assert [repair["phase"] for repair in status.repairs] == ["done"]
        service.stop()
        page.wait_for("!document.getElementById('lost').hidden", PATIENCE_S)
        assert "Connection lost" in page.evaluate("document.getElementById('lost').textContent")
