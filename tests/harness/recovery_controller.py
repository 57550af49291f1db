"""The controller of a cluster on paper: the real decisions of a restore, and a plain bookkeeping of requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dejavu.control.ending import Limits, ending
from dejavu.control.holdings import HeldRow, RowProgress, RowRestore
from dejavu.control.plan import Plan
from dejavu.control.recovery import copies_again, restore_of
from dejavu.control.ring import AdmittedRow
from dejavu.ids import Epoch, RowId, WorkerName

from harness import recovery_messages as m


@dataclass(slots=True, eq=False)
class Asked:
    """A request as the controller knows it."""

    prompt: list[int]
    limits: Limits
    tokens: list[int] = field(default_factory=list)
    row_id: RowId | None = None
    slot: tuple[int, int] | None = None
    num_known: int = 0
    """So many of the next sampled tokens are known already."""
    is_gone: bool = False
    """Stage 0 has let go of the row."""

    @property
    def is_done(self) -> bool:
        return bool(self.tokens) and ending(self.tokens[-1], len(self.tokens), self.limits) is not None


class RecoveryController:
    """Requests and their rows. It acts in ``epoch``, None while it waits for a plan's workers to serve.

    Args:
        send: gives a message to a worker of the controller's epoch.
        on_restored: told of every restore, with its request, before it is carried out.
    """

    def __init__(
        self, send: Callable[[WorkerName, Any], None], on_restored: Callable[[RowRestore, Asked], None]
    ) -> None:
        self.asked: list[Asked] = []
        self.plan: Plan | None = None
        self.epoch: Epoch | None = None
        self._send = send
        self._on_restored = on_restored
        self._holdings: dict[WorkerName, tuple[HeldRow, ...]] = {}
        self._is_serving = False
        self._steps: dict[int, int] = {}
        self._row_ids = itertools.count(1)

    def ask(self, prompt: list[int], limits: Limits) -> None:
        """One more request waits."""
        self.asked.append(Asked(prompt, limits))

    def fence(self, plan: Plan) -> None:
        """Nothing of an older epoch counts any more."""
        self.plan, self.epoch, self._is_serving = plan, None, False

    def form(self) -> None:
        """Every worker of the plan is there: they are asked what they hold."""
        self.epoch = self.plan.epoch
        self._holdings = {}
        for name in self.plan.workers:
            self._send(name, m.AskHoldings())

    @property
    def can_start_prompt(self) -> bool:
        return self._is_serving and bool(self._waiting()) and bool(self._free_slots())

    def start_prompt(self) -> None:
        """The first request that waits has a row."""
        one = self._waiting()[0]
        one.slot = self._free_slots()[0]
        self._run_prompt(one, one.prompt)

    def receive(self, body: Any) -> None:
        """A message of the controller's own epoch."""
        match body:
            case m.Holdings():
                self._holdings[body.worker] = body.rows
                if len(self._holdings) == len(self.plan.workers):
                    self._restore()
            case m.PromptToken():
                self._prompt_done(self._row(body.row_id), body.token)
            case m.StepTokens():
                microbatch = body.step.microbatch
                assert body.step.step == self._steps.get(microbatch, 0) + 1, "a step was lost or made twice"
                self._steps[microbatch] = body.step.step
                for row_id, token in body.tokens.items():
                    self._sampled(self._row(row_id), token)
            case m.RowsEnded():
                for row_id in body.row_ids:
                    self._row(row_id).is_gone = True
                    self._free(self._row(row_id))

    def _waiting(self) -> list[Asked]:
        return [one for one in self.asked if one.slot is None and not one.is_done]

    def _free_slots(self) -> list[tuple[int, int]]:
        pipeline = self.plan.token_pipeline
        taken = {one.slot for one in self.asked}
        every = itertools.product(range(pipeline.in_flight), range(pipeline.microbatch_rows))
        return [slot for slot in every if slot not in taken]

    def _row(self, row_id: RowId) -> Asked:
        (one,) = (one for one in self.asked if one.row_id == row_id)
        return one

    def _free(self, one: Asked) -> None:
        if one.is_done and one.is_gone:
            one.slot = None

    def _run_prompt(self, one: Asked, tokens: list[int]) -> None:
        one.row_id = RowId(next(self._row_ids))
        self._send(self.plan.prompt_pipeline.stages[0].worker, m.RunPrompt(one.row_id, tuple(tokens)))

    def _prompt_done(self, one: Asked, token: int) -> None:
        if self.plan.recovery == "restart" and one.tokens:
            assert token == one.tokens[0], "a prompt that was made again gave another token"
            one.num_known = len(one.tokens) - 1
            self._admit(one, len(one.prompt), None)
            return
        one.tokens.append(token)
        one.num_known = 0
        if one.is_done:
            one.slot = None
        else:
            self._admit(one, len(one.prompt) + len(one.tokens) - 1, None)

    def _sampled(self, one: Asked, token: int) -> None:
        if one.num_known:
            assert token == one.tokens[-one.num_known], "a step that was made again gave another token"
            one.num_known -= 1
            return
        assert not one.is_done, "a token after the last"
        one.tokens.append(token)
        self._free(one)

    def _admit(self, one: Asked, position: int, ready_stages: int | None) -> None:
        """The row steps from ``position`` on, whose token is known; so are perhaps some after it."""
        sequence = one.prompt + one.tokens
        row = AdmittedRow(
            row_id=one.row_id,
            microbatch=one.slot[0],
            row_index=one.slot[1],
            position=position,
            token=sequence[position],
            num_generated=position + 1 - len(one.prompt),
            limits=one.limits,
            known=tuple(sequence[position + 1 :]),
            ready_stages=ready_stages,
        )
        self._send(self.plan.token_pipeline.stages[0].worker, row)

    def _restore(self) -> None:
        """Every open row goes on from what the workers of the new epoch hold."""
        for one in self.asked:
            one.is_gone = one.is_done
            self._free(one)
        rows = {one.row_id: one for one in self.asked if one.slot is not None}
        progress = [
            RowProgress(row_id=row_id, num_prompt=len(one.prompt), num_tokens=len(one.tokens))
            for row_id, one in rows.items()
        ]
        restores = restore_of(self.plan, self._holdings, progress)
        assert [restore.row_id for restore in restores] == list(rows)
        self._steps = self._resume_steps(restores, rows)
        self._send(self.plan.token_pipeline.stages[0].worker, m.Resume(dict(self._steps)))
        for copy in copies_again(self.plan, self._holdings, restores):
            self._send(copy.worker, copy)
        for restore in restores:
            self._on_restored(restore, rows[restore.row_id])
            self._go_on(rows[restore.row_id], restore)
        self._is_serving = True

    def _resume_steps(self, restores: tuple[RowRestore, ...], rows: dict[RowId, Asked]) -> dict[int, int]:
        """Each microbatch goes on after the last step that none of its rows needs again."""
        replayed: dict[int, int] = {}
        for restore in restores:
            microbatch, _ = rows[restore.row_id].slot
            if restore.tier == "replica":
                replayed[microbatch] = max(restore.replayed, replayed.get(microbatch, 0))
        return {microbatch: max(0, step - replayed.get(microbatch, 0)) for microbatch, step in self._steps.items()}

    def _go_on(self, one: Asked, restore: RowRestore) -> None:
        if restore.tier == "replica":
            one.num_known = restore.replayed
            for fetch in restore.fetches:
                self._send(fetch.source, fetch)
            self._admit(one, restore.length, len({fetch.target for fetch in restore.fetches}))
        else:
            self._run_prompt(one, one.prompt + (one.tokens if restore.tier == "recompute" else []))
