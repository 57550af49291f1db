"""Token stage 0's state: which rows live in which microbatch, and which microbatch steps next. Pure, no clock.

A row goes ``pending`` (admitted, its KV not yet on every stage) -> ``live`` -> gone. A microbatch has at most one
step under way, so when its tokens are back, no stage computes on it any more: only then are rows added or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dejavu.control.ending import Limits, ending
from dejavu.errors import InvalidTransition
from dejavu.ids import RowId
from dejavu.request import Sampling

_MOST_TOMBSTONES = 65_536


class AdmittedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row whose first token is known and did not end it."""

    row_id: RowId
    microbatch: int
    row_index: int
    """Within its microbatch."""
    position: int
    """The cell that the next step writes: the prompt's length for a new row."""
    token: int
    num_generated: int
    limits: Limits
    sampling: Sampling = Sampling()
    known: tuple[int, ...] = ()
    """The tokens after ``token``, of a row that goes on from before its newest one: they are taken, not sampled."""
    ready_stages: int | None = None
    """Stages whose readiness this row needs; None: as many as any row of this ring."""


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One row of a step, as it travels with the activations."""

    row_id: RowId
    row_index: int
    position: int
    token: int
    sampling: Sampling | None
    """None: greedy, without log-probabilities."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one microbatch: a token for each of its live rows."""

    microbatch: int
    step: int
    rows: tuple[StepRow, ...]


@dataclass(slots=True, kw_only=True)
class _Microbatch:
    live: dict[RowId, AdmittedRow] = field(default_factory=dict)
    released: set[RowId] = field(default_factory=set)
    step: int = 0
    is_under_way: bool = False
    joining: list[AdmittedRow] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Group:
    """Rows that join together, once each is ready on every stage."""

    rows: dict[RowId, AdmittedRow]
    since_s: float


class Ring:
    """The microbatches of a token pipeline, as stage 0 sees them.

    Args:
        num_microbatches: microbatches under way at most.
        num_ready_stages: stages whose readiness a row needs before it joins (0 in a colocated pipeline, where
            the prompt itself went through the same stages in the same order).
    """

    def __init__(self, *, num_microbatches: int, num_ready_stages: int) -> None:
        self._microbatches = [_Microbatch() for _ in range(num_microbatches)]
        self._num_ready_stages = num_ready_stages
        self._ready: dict[RowId, set[int]] = {}
        self._groups: list[_Group] = []
        self._tombstones: dict[RowId, None] = {}
        self._next = 0

    @property
    def num_live(self) -> int:
        """Rows that step."""
        return sum(len(microbatch.live) for microbatch in self._microbatches)

    @property
    def num_pending(self) -> int:
        """Rows that are admitted and not yet live."""
        joining = sum(len(microbatch.joining) for microbatch in self._microbatches)
        return joining + sum(len(group.rows) for group in self._groups)

    def admit(self, rows: Sequence[AdmittedRow], now_s: float) -> None:
        """The rows join their microbatch together, as soon as all of them are ready on every stage.

        A row that was released before is left out. Raises InvalidTransition for a microbatch that is not there.
        """
        for row in rows:
            if not 0 <= row.microbatch < len(self._microbatches):
                raise InvalidTransition(f"row {row.row_id} admitted to microbatch {row.microbatch}, which is not there")
        wanted = {row.row_id: row for row in rows if row.row_id not in self._tombstones}
        if wanted:
            self._groups.append(_Group(rows=wanted, since_s=now_s))
            self._join()

    def resume_at(self, steps: Mapping[int, int]) -> None:
        """Each of the microbatches has finished so many steps before: the next one is numbered after them."""
        for index, step in steps.items():
            self._microbatches[index].step = step

    def row_ready(self, row_id: RowId, stage: int) -> None:
        """Stage ``stage`` holds the row's whole prompt KV. A word about a row that is gone is ignored."""
        if row_id in self._tombstones:
            return
        self._ready.setdefault(row_id, set()).add(stage)
        self._join()

    def release(self, row_ids: Iterable[RowId]) -> tuple[RowId, ...]:
        """The rows get no further step. Returns those that are gone now; the rest go when their step is back."""
        gone = []
        for row_id in row_ids:
            microbatch = self._microbatch_of(row_id)
            if microbatch is not None and microbatch.is_under_way and row_id in microbatch.live:
                microbatch.released.add(row_id)
                continue
            self._forget(row_id, microbatch)
            gone.append(row_id)
        self._join()
        return tuple(gone)

    def next_step(self) -> Step | None:
        """The next step to compute, its microbatch under way from now on; None when nothing can step."""
        count = len(self._microbatches)
        for offset in range(count):
            index = (self._next + offset) % count
            microbatch = self._microbatches[index]
            if microbatch.live and not microbatch.is_under_way:
                self._next = (index + 1) % count
                microbatch.is_under_way = True
                microbatch.step += 1
                rows = sorted(microbatch.live.values(), key=lambda row: row.row_index)
                return Step(microbatch=index, step=microbatch.step, rows=tuple(_step_row(row) for row in rows))
        return None

    def complete(self, microbatch_index: int, step: int, tokens: Mapping[RowId, int]) -> tuple[RowId, ...]:
        """The step's tokens are back: rows move on by one. Returns the rows that ended with it or were released.

        Raises:
            InvalidTransition: the step is not the one under way, or a row's token is missing.
        """
        microbatch = self._microbatches[microbatch_index]
        if not microbatch.is_under_way or microbatch.step != step:
            raise InvalidTransition(
                f"tokens of step {step} for microbatch {microbatch_index}, which is at step {microbatch.step} "
                f"({'under way' if microbatch.is_under_way else 'idle'})"
            )
        microbatch.is_under_way = False
        gone = []
        for row_id, row in list(microbatch.live.items()):
            if row_id not in tokens:
                raise InvalidTransition(f"step {step} of microbatch {microbatch_index} has no token for row {row_id}")
            token, num_generated = (*row.known, tokens[row_id])[0], row.num_generated + 1
            if row_id in microbatch.released or ending(token, num_generated, row.limits) is not None:
                self._forget(row_id, microbatch)
                gone.append(row_id)
            else:
                microbatch.live[row_id] = msgspec.structs.replace(
                    row, token=token, num_generated=num_generated, position=row.position + 1, known=row.known[1:]
                )
        self._join()
        return tuple(gone)

    def overdue(self, before_s: float) -> tuple[RowId, ...]:
        """Rows admitted before ``before_s`` whose KV is still not complete on every stage."""
        return tuple(
            row_id
            for group in self._groups
            if group.since_s < before_s
            for row_id, row in group.rows.items()
            if not self._is_ready(row)
        )

    def _join(self) -> None:
        for group in list(self._groups):
            if all(map(self._is_ready, group.rows.values())):
                self._groups.remove(group)
                for row in group.rows.values():
                    self._microbatches[row.microbatch].joining.append(row)
        for microbatch in self._microbatches:
            if not microbatch.is_under_way:
                microbatch.live.update({row.row_id: row for row in microbatch.joining})
                microbatch.joining.clear()

    def _is_ready(self, row: AdmittedRow) -> bool:
        needed = self._num_ready_stages if row.ready_stages is None else row.ready_stages
        return len(self._ready.get(row.row_id, ())) >= needed

    def _microbatch_of(self, row_id: RowId) -> _Microbatch | None:
        for microbatch in self._microbatches:
            if row_id in microbatch.live or any(row.row_id == row_id for row in microbatch.joining):
                return microbatch
        return None

    def _forget(self, row_id: RowId, microbatch: _Microbatch | None) -> None:
        self._ready.pop(row_id, None)
        self._tombstones[row_id] = None
        if len(self._tombstones) > _MOST_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        for group in list(self._groups):
            group.rows.pop(row_id, None)
            if not group.rows:
                self._groups.remove(group)
        if microbatch is not None:
            microbatch.live.pop(row_id, None)
            microbatch.released.discard(row_id)
            microbatch.joining = [row for row in microbatch.joining if row.row_id != row_id]


def _step_row(row: AdmittedRow) -> StepRow:
    sampling = None if row.sampling.is_plain else row.sampling
    return StepRow(row.row_id, row.row_index, row.position, row.token, sampling)
