"""A cluster in random order: the real controller, admission and ring; everything between them is chosen by a seed.

Links keep their order, different links do not; KV becomes ready in any order, is lost, or is spoilt; prompts fail.
Nothing waits: time moves on only when nothing else can happen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dejavu.clock import VirtualClock
from dejavu.control.ending import ending
from dejavu.control.plan import Plan
from dejavu.control.ring import AdmittedRow, Ring, Step
from dejavu.engine import messages as m
from dejavu.engine.mailbox import Received
from dejavu.ids import RowId
from dejavu.request import Completion, Request
from dejavu.serving.controller import Controller
from dejavu.serving.source import Arrival, Cancellation, ListedSource
from dejavu.serving.tracking import limits_of

from harness.plans import VOCAB_SIZE

MOST_IDLE_LOOKS = 5


def right_token(prompt: Sequence[int], num_generated: int) -> int:
    """The model of this cluster: the ``num_generated``-th new token (1 for the first)."""
    return (sum(prompt) * 31 + len(prompt) * 7 + num_generated * 13) % VOCAB_SIZE


class LetterCodec:
    """A letter a token, for stop strings."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


class Parcel:
    """An inbound message that wants to be released once."""

    def __init__(self) -> None:
        self.num_releases = 0

    def release(self) -> None:
        self.num_releases += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How likely each fault is, at each chance that it has."""

    prompt_fails: float = 0.0
    kv_lost: float = 0.0
    kv_spoilt: float = 0.0


@dataclass(slots=True)
class Row:
    """What is really so of a row, whatever controller and ring believe."""

    request: Request
    place: tuple[int, int]
    ready: set[int] = field(default_factory=set)
    is_gone: bool = False
    num_generated: int = 0


class FickleSource(ListedSource):
    """Requests that arrive, of which somebody gives one up now and then: before it has come, or after its end."""

    def __init__(self, requests: Sequence[Request], chooser: random.Random, cancels: float) -> None:
        super().__init__(requests)
        self._ids = [request.id for request in requests]
        self._chooser = chooser
        self._cancels = cancels

    def take(self, now_s: float) -> Sequence[Arrival]:
        is_cancelling = self._ids and self._chooser.random() < self._cancels
        given_up = [Cancellation(request_id=self._chooser.choice(self._ids))] if is_cancelling else []
        return [*super().take(now_s), *given_up]


class SimulatedCluster:
    """Stands in for the links of a controller; its mailbox gives the controller what the cluster says."""

    def __init__(self, plan: Plan, seed: int, faults: Faults) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.mailbox = self
        self.rows: dict[RowId, Row] = {}
        self.faulted: set[str] = set()
        self.tokens_told: list[tuple[str, float]] = []
        self.completions: dict[str, Completion] = {}
        self._faults = faults
        self._chooser = random.Random(seed)
        self._num_stages = plan.token_pipeline.depth if plan.mode == "disaggregated" else 0
        self.ring = Ring(num_microbatches=plan.token_pipeline.in_flight, num_ready_stages=self._num_stages)
        self._requests: dict[int, Request] = {}
        """By the first token of the prompt."""
        self._to_prompt: deque[m.RunPrompt] = deque()
        self._to_ring: deque[m.AnyMessage] = deque()
        self._from_prompt: deque[m.AnyMessage] = deque()
        self._from_ring: deque[m.AnyMessage] = deque()
        self._from_last: deque[m.AnyMessage] = deque()
        self._from_others: deque[m.AnyMessage] = deque()
        self._kv: list[tuple[RowId, int]] = []
        self._steps: deque[Step] = deque()
        self._stepped: dict[int, set[RowId]] = {}
        self._parcels: list[Parcel] = []
        self._num_idle = 0
        self.controller = Controller(self, LetterCodec(), self, self)  # type: ignore[arg-type]

    def serve(self, requests: Sequence[Request], *, cancels: float = 0.0) -> dict[str, Completion]:
        """Every request's line, after everything that was under way has come to rest.

        ``cancels``: how likely a request, any of them, is cancelled at each look for new ones.
        """
        self._requests = {request.prompt_tokens[0]: request for request in requests}
        self.controller.run(FickleSource(requests, self._chooser, cancels))
        while (event := self.take(1.0)) is not None:
            self.controller._handle(event)
        assert all(parcel.num_releases == 1 for parcel in self._parcels)
        return self.completions

    # What the controller calls: its links, its mailbox, its observer, its overseer.

    def prompt_first(self, message: m.RunPrompt, payload: Sequence[memoryview] = ()) -> None:
        ids = memoryview(payload[0]).cast("i")
        width = len(ids) // len(message.rows)
        for index, row in enumerate(message.rows):
            prompt = tuple(ids[index * width : index * width + row.length])
            self._place(row, prompt)
        self._to_prompt.append(message)

    def token_first(self, message: m.AnyMessage) -> None:
        self._to_ring.append(message)

    def token_stages(self, message: m.AnyMessage) -> None:
        assert isinstance(message, m.ExpectRows)

    def row_holders(self, message: m.AnyMessage) -> None:
        self._to_ring.append(message)

    def take(self, timeout_s: float) -> Received | None:
        """A message for the controller, once one is due; None when it should do something else first."""
        if timeout_s == 0.0 and self._chooser.random() < 0.5:
            return None
        while actions := self._possible():
            self._num_idle = 0
            message = self._chooser.choice(actions)()
            if message is not None:
                self._parcels.append(Parcel())
                return Received(message=message, inbound=self._parcels[-1])  # type: ignore[arg-type]
            if timeout_s == 0.0:
                return None
        if timeout_s > 0.0:
            self._let_time_pass()
        return self.take(timeout_s) if self._from_ring and timeout_s > 0.0 else None

    def token(self, request_id: str, at_s: float) -> None:
        self.tokens_told.append((request_id, at_s))

    def why_failed(self) -> str | None:
        return None

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        assert completion.id not in self.completions, f"{completion.id} ended twice"
        assert len(token_times_s) == len(completion.tokens)
        self.completions[completion.id] = completion

    # What happens in the cluster.

    def _possible(self) -> list[Callable[[], m.AnyMessage | None]]:
        actions: list[Callable[[], Any]] = [
            queue.popleft for queue in (self._from_prompt, self._from_ring, self._from_last, self._from_others) if queue
        ]
        actions += [self._run_prompt] * bool(self._to_prompt)
        actions += [self._tell_ring] * bool(self._to_ring)
        actions += [self._kv_ready] * bool(self._kv)
        actions += [self._finish_step] * bool(self._steps)
        actions += [self._start_step] * self._can_step()
        return actions

    def _can_step(self) -> bool:
        under_way = {step.microbatch for step in self._steps}
        return any(mb.live for index, mb in enumerate(self.ring._microbatches) if index not in under_way)

    def _place(self, row: m.PromptRow, prompt: tuple[int, ...]) -> None:
        request = self._requests[prompt[0]]
        known = prompt[len(request.prompt_tokens) :]
        assert prompt == (*request.prompt_tokens, *known)
        assert known == tuple(right_token(request.prompt_tokens, index + 1) for index in range(len(known)))
        place = (row.microbatch, row.row_index)
        pipeline = self.plan.token_pipeline
        assert place[0] < pipeline.in_flight
        assert place[1] < pipeline.microbatch_rows
        assert row.row_id not in self.rows, "a row id was used twice"
        holders = [other for other in self.rows.values() if other.place == place and not other.is_gone]
        assert not holders, f"place {place} has two owners"
        self.rows[row.row_id] = Row(request=request, place=place, num_generated=len(known))

    def _run_prompt(self) -> None:
        message = self._to_prompt.popleft()
        row_ids = tuple(row.row_id for row in message.rows)
        fails = self._chooser.random() < self._faults.prompt_fails
        for row_id in row_ids:
            self._kv += [(row_id, stage) for stage in range(self._num_stages) if not fails and self._survives(row_id)]
        if fails:
            self._fault(row_ids)
            self._from_prompt.append(m.RowsFailed(epoch=1, row_ids=row_ids, reason="prompt", while_prompt=True))  # type: ignore[arg-type]
            return
        tokens = tuple(self._next_token(row_id) for row_id in row_ids)
        self._from_prompt.append(m.PromptTokens(epoch=self.plan.epoch, row_ids=row_ids, tokens=tokens))

    def _next_token(self, row_id: RowId) -> int:
        truth = self.rows[row_id]
        truth.num_generated += 1
        return right_token(truth.request.prompt_tokens, truth.num_generated)

    def _survives(self, row_id: RowId) -> bool:
        if self._chooser.random() >= self._faults.kv_lost:
            return True
        self._fault((row_id,))
        return False

    def _kv_ready(self) -> None:
        row_id, stage = self._kv.pop(self._chooser.randrange(len(self._kv)))
        if self._chooser.random() < self._faults.kv_spoilt:
            self._fault((row_id,))
            self._from_others.append(m.RowsFailed(epoch=self.plan.epoch, row_ids=(row_id,), reason="spoilt"))
            # Now and then a good copy comes after the bad one, and the row goes on before the complaint is heard.
            self._kv += [(row_id, stage)] * (self._chooser.random() < 0.5)
            return
        self.rows[row_id].ready.add(stage)
        self.ring.row_ready(row_id, stage)

    def _fault(self, row_ids: Sequence[RowId]) -> None:
        self.faulted |= {self.rows[row_id].request.id for row_id in row_ids}

    def _tell_ring(self) -> None:
        message = self._to_ring.popleft()
        if isinstance(message, m.AdmitRows):
            for row in message.rows:
                self._check_admitted(row)
            self.ring.admit(message.rows, self.clock.monotonic())
        else:
            assert isinstance(message, m.ReleaseRows)
            self._gone(self.ring.release(message.row_ids))

    def _check_admitted(self, row: AdmittedRow) -> None:
        truth = self.rows[row.row_id]
        prompt, num_generated = truth.request.prompt_tokens, truth.num_generated
        assert (row.microbatch, row.row_index) == truth.place
        assert (row.position, row.num_generated) == (len(prompt) + num_generated - 1, num_generated)
        assert row.token == right_token(prompt, num_generated)
        assert (row.known, row.ready_stages) == ((), None)

    def _start_step(self) -> None:
        step = self.ring.next_step()
        assert step is not None, "the ring has live rows at rest, but nothing to step"
        assert step.microbatch not in {other.microbatch for other in self._steps}, "two steps of one microbatch"
        row_ids = {row.row_id for row in step.rows}
        before = self._stepped.get(step.microbatch, set())
        if self.plan.scheduling == "microbatch" and not row_ids <= before:
            assert all(self.rows[row_id].is_gone for row_id in before), "refilled before the microbatch was empty"
        self._stepped[step.microbatch] = row_ids
        assert [row.row_index for row in step.rows] == sorted({row.row_index for row in step.rows})
        for row in step.rows:
            truth = self.rows[row.row_id]
            assert not truth.is_gone
            assert len(truth.ready) == self._num_stages, "a row steps before its KV is whole on every stage"
            assert (step.microbatch, row.row_index) == truth.place
            prompt, num_generated = truth.request.prompt_tokens, truth.num_generated
            assert row.position == len(prompt) + num_generated - 1
            assert row.token == right_token(prompt, num_generated)
        self._steps.append(step)

    def _finish_step(self) -> None:
        step = self._steps.popleft()
        tokens = {row.row_id: self._next_token(row.row_id) for row in step.rows}
        done = m.StepTokens(
            epoch=self.plan.epoch,
            microbatch=step.microbatch,
            step=step.step,
            row_ids=tuple(tokens),
            tokens=tuple(tokens.values()),
        )
        self._from_last.append(done)
        self._gone(self.ring.complete(step.microbatch, step.step, tokens))

    def _gone(self, row_ids: Sequence[RowId]) -> None:
        under_way = {row.row_id for step in self._steps for row in step.rows}
        assert not under_way & set(row_ids), "a row is given back while a stage computes on it"
        for row_id in row_ids:
            self.rows[row_id].is_gone = True
        if row_ids:
            self._from_ring.append(m.RowsEnded(epoch=self.plan.epoch, row_ids=tuple(row_ids)))

    def _let_time_pass(self) -> None:
        self._num_idle += 1
        assert self._num_idle < MOST_IDLE_LOOKS, "the cluster is stuck"
        self.clock.advance(self.plan.timeout_s + 1.0)
        overdue = self.ring.overdue(self.clock.monotonic() - self.plan.timeout_s)
        if overdue:
            self.ring.release(overdue)
            self._from_ring.append(m.RowsFailed(epoch=self.plan.epoch, row_ids=overdue, reason="overdue"))


def right_tokens(request: Request, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that the request must get."""
    limits = limits_of(request, eos_token_ids)
    tokens: list[int] = []
    while True:
        tokens.append(right_token(request.prompt_tokens, len(tokens) + 1))
        text = LetterCodec().decode([token for token in tokens if token not in limits.eos_token_ids])
        if ending(tokens[-1], len(tokens), limits) is not None or any(stop in text for stop in request.stop):
            return tuple(tokens)
