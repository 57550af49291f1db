"""A stage's main thread, step by step, with made-up computation and links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from dejavu.clock import VirtualClock
from dejavu.control.ending import Limits
from dejavu.control.plan import Plan
from dejavu.control.ring import AdmittedRow, Ring
from dejavu.engine import messages as m
from dejavu.engine.compute import Sampled
from dejavu.engine.engine import Engine
from dejavu.engine.fetching import MOST_FETCHES
from dejavu.engine.host import Host
from dejavu.engine.kept import Kept
from dejavu.engine.mailbox import ChunksSpoilt, Event, Mailbox, PeerLost, Received, Wake
from dejavu.engine.meter import Meter
from dejavu.engine.outflow import Outflow
from dejavu.engine.passes import Passes
from dejavu.engine.peers import CONTROLLER
from dejavu.engine.sources import Sources
from dejavu.engine.step_memory import Resident
from dejavu.errors import Fatal
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.chunk import ChunkHeader, seal
from dejavu.kv.layout import LayerRange
from dejavu.kv.streamer import StreamStalled
from dejavu.report.spans import SpanRecorder
from dejavu.transport.base import Hello, Inbound

from harness.plans import colocated_plan, split_plan

EPOCH = Epoch(1)
A, B = RowId(1), RowId(2)


class FakeModel:
    hidden_size = 4
    dtype = torch.float32
    device = torch.device("cpu")


@dataclass
class FakeCompute:
    """Every step takes a second; every token is 1. A test may let prompts fail."""

    clock: VirtualClock
    prompt_error: Exception | None = None
    num_steps: int = 0
    before_step: Callable[[int], None] = lambda num_steps: None

    def prompt(self, rows: Sequence[m.PromptRow], inputs: torch.Tensor, on_layer: Any, on_written: Any) -> torch.Tensor:
        if self.prompt_error is not None:
            raise self.prompt_error
        return torch.zeros(len(rows), inputs.shape[1], 4)

    def step(self, microbatch: int, rows: Sequence[Any], inputs: torch.Tensor | None) -> torch.Tensor:
        self.num_steps += 1
        self.before_step(self.num_steps)
        self.clock.advance(1.0)
        return torch.zeros(len(rows), 1, 4)

    def sample_step(self, rows: Sequence[Any], output: torch.Tensor) -> Sampled:
        return Sampled((1,) * len(rows))

    def sample_prompt(self, rows: Sequence[Any], output: torch.Tensor) -> Sampled:
        return Sampled((1,) * len(rows))


class ScriptedMailbox(Mailbox):
    """A mailbox in which waiting lets virtual time pass; too much of it is an error."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(cluster="c", epoch=lambda: EPOCH, fingerprint=lambda: "")
        self._clock = clock

    def take(self, timeout_s: float) -> Event | None:
        event = super().take(0.0)
        if event is None and timeout_s > 0.0:
            self._clock.advance(timeout_s)
            assert self._clock.now() < 1000.0, "the engine waits for ever"
        return event


@dataclass
class FakeLanded:
    taken: set[RowId] = field(default_factory=set)

    def unproven(self, row_ids: Sequence[RowId]) -> tuple[RowId, ...]:
        return tuple(row_id for row_id in row_ids if row_id not in self.taken)


class Nothing:
    """A streamer that keeps nothing of what it sent."""

    def retained(self, row_id: RowId, layers: LayerRange) -> None:
        return None

    def end_pass(self) -> None:
        pass

    def abandon_pass(self) -> None:
        pass


class Stand:
    """An engine with everything around it."""

    def __init__(self, plan: Plan, name: str, *, landed: FakeLanded | None = None) -> None:
        self.clock = VirtualClock()
        self.mailbox = ScriptedMailbox(self.clock)
        self.compute = FakeCompute(self.clock)
        self.told: list[tuple[str, m.AnyMessage]] = []
        self.is_asked_to_stop = self.is_superseded = False
        self.acks: list[tuple[str, int, bytes]] = []
        place = plan.place_of(WorkerName(name))
        assert place is not None
        pipeline = place.pipeline
        stages = pipeline.depth if pipeline.kind == "token" else 0
        has_ring = pipeline.kind != "prompt" and place.is_first
        self.ring = Ring(num_microbatches=pipeline.in_flight, num_ready_stages=stages) if has_ring else None
        recorder = SpanRecorder(self.clock)
        self.kept = Kept(recorder=recorder, meter=Meter(recorder), model=FakeModel())  # type: ignore[arg-type]
        self.kept.replicas.enter("c", plan, place)
        host = Host(
            name=WorkerName(name),
            plan=plan,
            place=place,
            kept=self.kept,
            mailbox=self.mailbox,
            peers=self,  # type: ignore[arg-type]
            clock=self.clock,
            reach=lambda worker: None,
            acknowledge=lambda *entry: self.acks.append(entry),
            is_asked_to_stop=lambda: self.is_asked_to_stop,
            is_superseded=lambda: self.is_superseded,
        )
        handoff = Nothing() if pipeline.kind == "prompt" else None
        self.out = Outflow(handoff=handoff)  # type: ignore[arg-type]
        memory = None if handoff else Resident(None, pipeline.microbatch_rows)  # type: ignore[arg-type]
        self.engine = Engine(
            host,
            Passes(host, self.compute, None, memory, self.out),  # type: ignore[arg-type]
            rows=None,
            ring=self.ring,
            landed=landed,  # type: ignore[arg-type]
            memory=memory,
            out=self.out,
            sources=Sources(host, self.kept, "c"),
        )

    def tell(self, peer: str, message: m.AnyMessage, payload: Sequence[memoryview] = ()) -> None:
        self.told.append((peer, message))

    def get(self, message: m.AnyMessage, payload: bytes = b"") -> None:
        hello = Hello(cluster="c", name="x", incarnation="i", epoch=1)
        inbound = Inbound(hello=hello, header=b"", payload=memoryview(payload), release=lambda: None)
        self.mailbox.post(Received(message=message, inbound=inbound))

    def stop_at(self, num_steps: int) -> None:
        self.compute.before_step = lambda done: self.get(m.Stop(epoch=EPOCH)) if done == num_steps else None

    def said(self, kind: type[m.Message], peer: str = CONTROLLER) -> list[Any]:
        return [message for name, message in self.told if name == peer and isinstance(message, kind)]


def admitted(row_id: RowId, row_index: int, max_tokens: int = 10_000) -> AdmittedRow:
    return AdmittedRow(
        row_id=row_id,
        microbatch=0,
        row_index=row_index,
        position=2,
        token=1,
        num_generated=1,
        limits=Limits(max_tokens=max_tokens),
    )


def run_prompt(*row_ids: RowId) -> tuple[m.RunPrompt, bytes]:
    rows = tuple(m.PromptRow(row_id, 0, index, 2, None) for index, row_id in enumerate(row_ids))
    return m.RunPrompt(epoch=EPOCH, rows=rows), np.ones((len(rows), 2), dtype=np.int32).tobytes()


def test_a_row_that_lost_its_kv_is_noticed_while_another_keeps_stepping() -> None:
    """The deadlines of rows used to be looked at by an idle stage alone."""
    stand = Stand(split_plan(1, 1, in_flight=1, timeout_s=5.0), "w1")
    stand.get(m.AdmitRows(epoch=EPOCH, rows=(admitted(A, 0),)))
    stand.get(m.RowReady(epoch=EPOCH, row_ids=(A,), stage=0))
    stand.get(m.AdmitRows(epoch=EPOCH, rows=(admitted(B, 1),)))
    stand.stop_at(20)
    stand.engine.run()
    (failed,) = stand.said(m.RowsFailed)
    assert (failed.row_ids, failed.while_prompt) == ((B,), False)


def test_steps_go_on_until_the_row_has_its_tokens_and_its_end_is_told() -> None:
    stand = Stand(colocated_plan(1, in_flight=1), "w0")
    stand.get(m.AdmitRows(epoch=EPOCH, rows=(admitted(A, 0, max_tokens=4),)))
    stand.stop_at(3)
    stand.engine.run()
    assert [message.step for message in stand.said(m.StepTokens)] == [1, 2, 3]
    assert [message.row_ids for message in stand.said(m.RowsEnded)] == [(A,)]


def test_prompts_that_arrived_go_before_steps() -> None:
    stand = Stand(colocated_plan(1, in_flight=1), "w0")
    stand.get(m.AdmitRows(epoch=EPOCH, rows=(admitted(A, 0, max_tokens=2),)))
    stand.get(*run_prompt(B))
    stand.stop_at(1)
    stand.engine.run()
    kinds = [type(message) for _, message in stand.told]
    assert kinds == [m.PromptTokens, m.StepTokens, m.RowsEnded]


@pytest.mark.parametrize("error", [RuntimeError("no memory"), StreamStalled("no way out")], ids=["compute", "stream"])
def test_a_prompt_that_fails_costs_its_rows_and_not_the_stage(error: Exception) -> None:
    """A stream that stalled used to end the worker."""
    stand = Stand(split_plan(1, 1), "w0")
    stand.compute.prompt_error = error
    stand.get(*run_prompt(A, B))
    with pytest.raises(AssertionError, match="waits for ever"):
        stand.engine.run()
    (failed,) = stand.said(m.RowsFailed)
    assert (failed.row_ids, failed.while_prompt) == ((A, B), True)
    assert str(error) in failed.reason


def test_a_middle_prompt_stage_passes_its_activations_on() -> None:
    stand = Stand(split_plan(2, 1), "w0")
    stand.get(*run_prompt(A))
    with pytest.raises(AssertionError, match="waits for ever"):
        stand.engine.run()
    assert [name for name, message in stand.told if isinstance(message, m.PromptActivations)] == ["w1"]


def bad_chunk(row_id: RowId) -> ChunkHeader:
    return seal(
        epoch=EPOCH,
        row_id=row_id,
        layers=LayerRange(1, 2),
        heads=(0, 1),
        positions=(0, 4),
        dtype="float32",
        payload=memoryview(b"1234"),
    )


def test_a_bad_chunk_of_a_row_whose_kv_is_proven_costs_nothing() -> None:
    stand = Stand(split_plan(1, 1), "w1", landed=FakeLanded(taken={A}))
    stand.mailbox.post(ChunksSpoilt(peer="w0", chunks=(bad_chunk(A), bad_chunk(A))))
    stand.get(m.Stop(epoch=EPOCH))
    stand.engine.run()
    assert stand.said(m.RowsFailed) == stand.said(m.SendAgain, "w0") == []


def test_a_bad_chunk_is_fetched_again_a_bounded_number_of_times_and_then_its_row_fails() -> None:
    stand = Stand(split_plan(1, 1), "w1", landed=FakeLanded(taken={A}))
    for _ in range(MOST_FETCHES):
        stand.mailbox.post(ChunksSpoilt(peer="w0", chunks=(bad_chunk(A), bad_chunk(B))))
    stand.get(m.Stop(epoch=EPOCH))
    stand.engine.run()
    wish = (m.KvPart(B, LayerRange(1, 2), (0, 4)),)
    assert [message.parts for message in stand.said(m.SendAgain, "w0")] == [wish] * MOST_FETCHES
    assert stand.said(m.RowsFailed) == []

    stand = Stand(split_plan(1, 1), "w1", landed=FakeLanded())
    for _ in range(MOST_FETCHES + 1):
        stand.mailbox.post(ChunksSpoilt(peer="w0", chunks=(bad_chunk(B),)))
    stand.get(m.Stop(epoch=EPOCH))
    stand.engine.run()
    assert [message.row_ids for message in stand.said(m.RowsFailed)] == [(B,)]


def test_kv_that_is_not_kept_any_more_cannot_be_sent_again_and_its_row_fails() -> None:
    stand = Stand(split_plan(1, 1), "w0")
    stand.get(m.SendAgain(epoch=EPOCH, parts=(m.KvPart(A, LayerRange(0, 1), (0, 4)),)))
    stand.get(m.Stop(epoch=EPOCH))
    stand.engine.run()
    (failed,) = stand.said(m.RowsFailed)
    assert failed.row_ids == (A,)
    assert "not kept any more" in failed.reason


def test_a_stop_ends_the_engine_even_after_peers_have_parted() -> None:
    stand = Stand(split_plan(1, 2), "w2")
    stand.mailbox.post(PeerLost(peer="w1", reason="closed", epoch=EPOCH))
    stand.get(m.Stop(epoch=EPOCH))
    stand.engine.run()


def test_a_link_between_workers_that_is_gone_is_told_to_the_controller_once() -> None:
    """The rows on it used to wait for ever, with both workers alive."""
    stand = Stand(split_plan(1, 2), "w2")
    for reason in ("deadline", "reset"):
        stand.mailbox.post(PeerLost(peer="w1", reason=reason, epoch=EPOCH))
    stand.get(m.Stop(epoch=EPOCH))
    stand.engine.run()
    assert stand.said(m.LinkLost) == [m.LinkLost(epoch=EPOCH, peer="w1", reason="deadline")]


def test_a_controller_that_stays_gone_is_fatal_after_the_timeout() -> None:
    stand = Stand(split_plan(1, 1, timeout_s=5.0), "w1")
    stand.mailbox.post(PeerLost(peer=CONTROLLER, reason="reset", epoch=EPOCH))
    with pytest.raises(Fatal, match="controller is gone: reset"):
        stand.engine.run()
    assert 5.0 < stand.clock.now() < 10.0


def test_a_controller_that_has_left_the_epoch_before_its_workers_is_not_taken_for_dead() -> None:
    stand = Stand(split_plan(1, 1, timeout_s=5.0), "w1")
    stand.mailbox.post(PeerLost(peer=CONTROLLER, reason="closed", epoch=EPOCH))
    stand.is_superseded = True
    stand.mailbox.post(Wake())
    stand.engine.run()
    assert stand.clock.now() == 0.0


def test_a_wake_up_ends_the_engine_when_a_newer_plan_is_in_force() -> None:
    stand = Stand(split_plan(1, 1), "w1")
    stand.is_superseded = True
    stand.mailbox.post(Wake())
    stand.engine.run()


def test_work_that_waits_when_its_epoch_ends_is_released_and_not_done() -> None:
    stand = Stand(colocated_plan(1, in_flight=1), "w0")
    released = []
    inbound = Inbound(
        hello=Hello(cluster="c", name="x", incarnation="i", epoch=1),
        header=b"",
        payload=memoryview(b""),
        release=lambda: released.append(True),
    )
    stand.is_superseded = True
    stand.mailbox.post(Received(message=run_prompt(A)[0], inbound=inbound))
    stand.mailbox.post(Wake())
    stand.engine.run()
    assert (released, stand.told) == ([True], [])


def test_a_wake_up_ends_the_engine_only_when_it_was_asked_to_stop() -> None:
    stand = Stand(split_plan(1, 1), "w1")
    stand.mailbox.post(Wake())
    stand.get(m.ReleaseRows(epoch=EPOCH, row_ids=()))
    with pytest.raises(AssertionError, match="waits for ever"):
        stand.engine.run()
    stand = Stand(split_plan(1, 1), "w1")
    stand.is_asked_to_stop = True
    stand.mailbox.post(Wake())
    stand.engine.run()


@pytest.mark.parametrize(
    ("name", "message", "words"),
    [
        ("w2", m.AdmitRows(epoch=EPOCH, rows=()), "only stage 0 keeps"),
        ("w0", m.ExpectRows(epoch=EPOCH, rows=()), "takes no rows"),
        ("w1", m.RowsEnded(epoch=EPOCH, row_ids=()), "not for a worker"),
    ],
)
def test_a_message_for_somebody_else_is_fatal(name: str, message: m.AnyMessage, words: str) -> None:
    stand = Stand(split_plan(1, 2), name)
    stand.get(message)
    with pytest.raises(Fatal, match=words):
        stand.engine.run()
