"""A thousand short requests, 64 at a time: no error, and no more handles or memory at the end than on the way."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.launched import own_store
from harness.served import Served, chatty_model, served

pytestmark = [pytest.mark.slow, pytest.mark.grid]

NUM_WARM, NUM_REQUESTS, CONCURRENCY = 300, 1000, 64
MOST_GROWTH_BYTES = 24 * 2**20
"""Of one process; spans are kept for the timeline, some hundred bytes a pass."""


def processes_of(service: Served) -> dict[str, int]:
    """Process ids of the front and of the workers."""
    workers = {member.name: member.pid for member in service.run.members().values()}
    return {"front": service.run.process.pid, **workers}


def num_handles(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    (line,) = (one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def ask(service: Served, numbers: Sequence[int]) -> None:
    def one(number: int) -> int:
        answer = service.client.completions.create(
            model="chatty",
            prompt=f"request {number}",
            max_tokens=4 + number % 9,
            stream=False,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        assert list(pool.map(one, numbers)) == [4 + number % 9 for number in numbers]


def test_a_thousand_requests_leave_handles_and_memory_as_they_were(tmp_path: Path) -> None:
    overrides = ["model=local", f"model.path={chatty_model(tmp_path)}", "serve.max_queue=100"]
    with own_store(tmp_path) as store, served(tmp_path, store, *overrides) as service:
        ask(service, range(NUM_WARM))
        pids = processes_of(service)
        handles = {name: num_handles(pid) for name, pid in pids.items()}
        memory = {name: resident_bytes(pid) for name, pid in pids.items()}
        ask(service, range(NUM_REQUESTS))
        for name, pid in pids.items():
            # Clients' connections are kept open for a while, and some of the pool's are closed later than others.
            assert num_handles(pid) <= handles[name] + CONCURRENCY, name
            assert resident_bytes(pid) <= memory[name] + MOST_GROWTH_BYTES, name
        assert service.end() == 0
