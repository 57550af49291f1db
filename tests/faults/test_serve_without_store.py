"""Readiness while the store is away: nobody can be fenced, and a service that lacks a worker is not ready."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launched import eventually
from harness.served import chatty_model, served
from harness.store_server import StoreServer

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.grid]


@pytest.fixture
def store(tmp_path: Path, nothing_left: None) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path)
    server.start()
    yield server
    server.kill()


def test_a_service_whose_worker_died_while_the_store_was_away_is_not_ready_until_it_is_repaired(
    store: StoreServer, tmp_path: Path
) -> None:
    """It used to stay ready, and what was asked of it waited to its timeout."""
    overrides = ["model=local", f"model.path={chatty_model(tmp_path)}", "serve.request_timeout_s=120"]
    with served(tmp_path, store.spec, *overrides) as service:

        def ask() -> str:
            answer = service.client.completions.create(
                model="chatty", prompt="ready?", max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
            )
            return answer.choices[0].text

        right = ask()
        (pid,) = (member.pid for member in service.run.members().values() if member.name == "w1")
        with store.frozen():
            assert service.get("/ready")[0] == 200, "requests go on without the store"
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: service.get("/ready")[0] == 503, "not ready without w1", timeout_s=10.0)
            assert service.get("/ready")[1]["reason"].startswith("the link of w1 is lost")
        eventually(lambda: service.get("/ready")[0] == 200, "ready again with another w1")
        assert ask() == right
        assert service.end() == 0
