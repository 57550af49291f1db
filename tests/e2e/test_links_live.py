"""What the links of a live cluster say of themselves, and what they cost: few messages, few descriptors."""

from __future__ import annotations

import logging
import math
import os
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dejavu.ids import Epoch, RequestId, RowId
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.primitives import StreamSetup, stream_out
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.request import Request
from operators.worker_process import WORKER_COMMAND

from harness.cluster_kit import Kit, cluster, reference_tokens
from harness.processes import our_processes, shared_memory_files, wait_gone

MOST_DESCRIPTORS = 256
NUM_REQUESTS, NUM_BEFORE_COUNT, REQUESTS_A_SERVE = 3000, 500, 500
UNDER_LIMIT = ("/bin/sh", "-c", f'ulimit -n {MOST_DESCRIPTORS}; exec "$@"', "sh", *WORKER_COMMAND)


@dataclass(frozen=True, slots=True)
class Live:
    """A cluster whose workers may have few descriptors, and what its controller logged while it came up."""

    kit: Kit
    controller_log: str
    output: Path

    def pid_of(self, worker: str) -> int:
        """The worker's process id, as the controller's log names it."""
        found = re.search(rf"worker {worker} starts as process (\d+)", self.controller_log)
        assert found is not None
        return int(found[1])


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    output, root, kept = tmp_path_factory.mktemp("links"), logging.getLogger(), Lines()
    level, before, files = root.level, our_processes(), shared_memory_files()
    root.addHandler(kept)
    root.setLevel(logging.INFO)
    try:
        with cluster(
            output,
            "model=tiny-llama",
            "strategy.split.prompt=1",
            "strategy.split.token=1",
            "strategy.microbatch.prompt=16",
            "strategy.microbatch.token=64",
            worker_command=UNDER_LIMIT,
        ) as kit:
            yield Live(kit, "\n".join(kept.lines), output)
    finally:
        root.setLevel(level)
        root.removeHandler(kept)
    assert wait_gone(before, timeout_s=10.0) == {}
    assert shared_memory_files() - files == set()


def links_named(log: str) -> dict[str, str]:
    """Transport and interface of each link by the peer's name, from the lines that say so."""
    return dict(re.findall(r"link to (\S+) at [\d.]+:\d+: ucx (.+/\S+)", log))


@pytest.mark.slow
def test_start_up_log_states_transport_and_interface_of_every_link_in_both_directions(live: Live) -> None:
    """Field report B26: a slow path that is chosen silently."""
    plan = live.kit.plan
    assert sorted(links_named(live.controller_log)) == sorted(plan.workers)
    for worker in plan.workers:
        log = (live.output / "workers" / f"{worker}.log").read_text()
        assert sorted(links_named(log)) == sorted({*plan.peers_of(worker), "controller"})


def short_requests(first: int, count: int) -> list[Request]:
    """Prompts of two tokens that ask for two; the same for the same numbers."""
    return [
        Request(
            id=RequestId(f"r{index}"),
            prompt_tokens=tuple(random.Random(index).randrange(250) for _ in range(2)),
            max_tokens=2,
            ignore_eos=True,
        )
        for index in range(first, first + count)
    ]


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.slow
def test_thousands_of_requests_leave_the_number_of_every_workers_descriptors_as_it_was(live: Live) -> None:
    """Field report B27: one connection for each transfer, or handles that add up, end at the process's limit."""
    pids = [live.pid_of(worker) for worker in live.kit.plan.workers]
    for pid in pids:
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(rf"Max open files +{MOST_DESCRIPTORS} +{MOST_DESCRIPTORS} ", limits)
    early: list[int] = []
    for first in range(0, NUM_REQUESTS, REQUESTS_A_SERVE):
        requests = short_requests(first, REQUESTS_A_SERVE)
        completions = live.kit.serve(requests)
        assert {line.finish_reason for line in completions.values()} == {"length"}
        sample = requests[:: REQUESTS_A_SERVE // 10]
        assert {one.id: completions[one.id].tokens for one in sample} == reference_tokens(live.kit.folder, sample)
        if first + REQUESTS_A_SERVE == NUM_BEFORE_COUNT:
            early = [num_descriptors(pid) for pid in pids]
    assert [num_descriptors(pid) for pid in pids] == early
    assert max(early) < MOST_DESCRIPTORS


class Counted:
    """A ``Sender`` that only counts what each owner would get."""

    def __init__(self) -> None:
        self.messages: dict[str, int] = {}
        self.num_bytes = 0

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        self.messages[owner] = self.messages.get(owner, 0) + 1
        self.num_bytes += sum(part.nbytes for part in payload)
        sent: Future[None] = Future()
        sent.set_result(None)
        return sent


def num_pieces(cells: torch.Tensor) -> int:
    """How many runs of memory hold the cells."""
    run = 1
    for size, stride in zip(reversed(cells.shape), reversed(cells.stride()), strict=True):
        if stride != run:
            break
        run *= size
    return math.prod(cells.shape) // run


@pytest.mark.parametrize("target_heads", [[(0, 4)], [(0, 1), (1, 4)]], ids=["one-owner", "two-owners"])
def test_one_layer_of_a_prompt_of_100_tokens_is_one_message_for_each_owner_and_many_pieces(
    target_heads: list[tuple[int, int]],
) -> None:
    """Field report B26: thousands of small pieces where one transfer would do."""
    layout = KvLayout(model_hash="m", num_layers=2, num_kv_heads=4, head_dim=24, dtype="float32", max_length=128)
    setup = StreamSetup(
        cluster="c",
        epoch=Epoch(1),
        source=Holding(owner="p", layers=LayerRange(0, 2), heads=(0, 4)),
        targets=tuple(
            Holding(owner=f"t{index}", layers=LayerRange(0, 2), heads=heads) for index, heads in enumerate(target_heads)
        ),
        layout=layout,
    )
    keys, values = torch.zeros(2, 1, 4, 128, 24)
    sender = Counted()
    stream_out(1, keys, values, [RowSpan(row_id=RowId(1), length=100)], setup, StagingRing(2, 1 << 20), sender)
    assert sender.messages == {target.owner: 1 for target in setup.targets}
    assert sender.num_bytes == 100 * layout.position_bytes
    assert num_pieces(keys[:, :, :100]) + num_pieces(values[:, :, :100]) == 8
    # As a model's own cache has it before attention, one token's heads beside the other's.
    by_token = keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert 2 * num_pieces(by_token[:, :, :100]) == 800
