"""A thousand short requests, 64 at a time, and a hundred clients that hang up: no error, and nothing is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.launched import eventually, own_store
from harness.served import Served, chatty_model, served
from harness.whole_model import Right

pytestmark = [pytest.mark.slow, pytest.mark.grid]

NUM_WARM, NUM_REQUESTS, NUM_HANG_UPS, CONCURRENCY = 300, 1000, 100, 64
MOST_GROWTH_BYTES = 24 * 2**20
"""Of one process; spans are kept for the timeline, some hundred bytes a pass."""
WORKERS = ["strategy=colocated", "strategy.stages=2", "strategy.replication=1"]
"""Two workers. (A prompt worker of its own keeps what it sent last, up to a bound that is beyond this test.)"""


def processes_of(service: Served) -> dict[str, int]:
    """Process ids of the front and of the workers."""
    workers = {member.name: member.pid for member in service.run.members().values()}
    return {"front": service.run.process.pid, **workers}


def num_handles(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    (line,) = (one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def ask(service: Served, right: Right, numbers: Sequence[int]) -> None:
    """All were asked for at once, as far as may be, and answered as the whole model answers."""

    def one(number: int) -> str:
        answer = service.client.completions.create(
            model="chatty",
            prompt=f"request {number}",
            max_tokens=4 + number % 9,
            temperature=0,
            stream=False,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        texts = list(pool.map(one, numbers))
    assert texts == [right.text(f"request {number}", 4 + number % 9) for number in numbers]


def num_rows(service: Served) -> int:
    """Rows that are taken, and rows whose KV a stage has."""
    state = service.get("/state")[1]
    stages = [stage for pipeline in state["pipelines"] for stage in pipeline["stages"]]
    return state["rows_taken"] + sum(sum(stage["rows"].values()) for stage in stages)


def hang_up(service: Served, after: int) -> None:
    """A stream that its client leaves after so many chunks."""
    if after == 0:
        service.ask_and_leave({"prompt": "never mind", "max_tokens": 200, "ignore_eos": True})
        return
    stream = service.client.completions.create(
        model="chatty", prompt="never mind", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(after):
        next(stream)
    stream.close()


def test_a_thousand_requests_leave_handles_and_memory_as_they_were(tmp_path: Path) -> None:
    folder = chatty_model(tmp_path)
    right = Right(folder)
    overrides = ["model=local", f"model.path={folder}", "serve.max_queue=200", *WORKERS]
    with own_store(tmp_path) as store, served(tmp_path, store, *overrides) as service:
        ask(service, right, range(NUM_WARM))
        pids = processes_of(service)
        handles = {name: num_handles(pid) for name, pid in pids.items()}
        memory = {name: resident_bytes(pid) for name, pid in pids.items()}
        ask(service, right, range(NUM_REQUESTS))
        for name, pid in pids.items():
            # Clients' connections are kept open for a while, and some of the pool's are closed later than others.
            assert num_handles(pid) <= handles[name] + CONCURRENCY, name
            assert resident_bytes(pid) <= memory[name] + MOST_GROWTH_BYTES, name
        assert service.end() == 0
    metrics = json.loads((service.run.folder / "metrics.json").read_text())
    assert metrics["requests"]["by_reason"] == {"length": NUM_WARM + NUM_REQUESTS}


def test_a_hundred_clients_that_hang_up_leave_every_row_free_and_the_others_their_answers(tmp_path: Path) -> None:
    """Field report B10. Rows that were given up are used by others at once, on every stage."""
    chooser = random.Random(1)
    folder = chatty_model(tmp_path)
    right = Right(folder)
    overrides = ["model=local", f"model.path={folder}", "serve.max_queue=200", *WORKERS]
    with own_store(tmp_path) as store, served(tmp_path, store, *overrides) as service:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            gone = [pool.submit(hang_up, service, chooser.choice([0, 0, 1, 2, 5, 20])) for _ in range(NUM_HANG_UPS)]
            ask(service, right, range(100))
            for one in gone:
                one.result()
        eventually(lambda: num_rows(service) == 0, "every row is free, at the controller and on every stage")
        assert service.end() == 0
    metrics = json.loads((service.run.folder / "metrics.json").read_text())
    by_reason = metrics["requests"]["by_reason"]
    # A slow client may go away when its answer is complete.
    assert by_reason["length"] >= 100
    assert by_reason["abort"] > NUM_HANG_UPS / 2
    assert set(by_reason) == {"length", "abort"}
