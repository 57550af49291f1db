"""Readiness tells of a worker that is dead or frozen, and of the end of its repair; what is asked meanwhile waits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from harness.launched import eventually, own_store
from harness.served import Served, chatty_model, served

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.grid]

ROLES = {"prompt": "w0", "token": "w1"}


def ask(service: Served, **fields: Any) -> str:
    answer = service.client.completions.create(
        model="chatty", prompt="ready?", max_tokens=10, temperature=0, extra_body={"ignore_eos": True}, **fields
    )
    return answer.choices[0].text


def test_ready_is_503_while_a_role_has_no_worker_and_200_after_its_repair(tmp_path: Path) -> None:
    """Field report B34."""
    overrides = ["model=local", f"model.path={chatty_model(tmp_path)}", "serve.request_timeout_s=120"]
    with own_store(tmp_path) as store, served(tmp_path, store, *overrides) as service:
        right = ask(service)
        for worker in ROLES.values():
            for signum in (signal.SIGKILL, signal.SIGSTOP):
                service.strike(worker, signum)
                eventually(lambda: service.get("/ready")[0] == 503, f"not ready without {worker}")
                status, told = service.get("/ready")
                assert status == 200 or "repair" in told["reason"]
                assert service.get("/health")[0] == 200
                assert ask(service) == right, "it waits for the repair"
                eventually(lambda: service.get("/ready")[0] == 200, f"ready again with another {worker}")
        assert service.end() == 0
