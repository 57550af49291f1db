"""The controller's state: which request gets which row, and which rows form the next prompt microbatch. Pure.

Admission is tied to free rows on the token side: a prompt is not run before its KV has a place, so waiting KV is
bounded by the token pipeline's rows however fast prompts are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dejavu.control.plan import Plan, Scheduling
from dejavu.control.request_queue import RequestQueue
from dejavu.errors import InvalidTransition
from dejavu.ids import RequestId, RowId
from dejavu.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A destination row: microbatch and row within it."""

    microbatch: int
    row_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """A request with its row."""

    request: Request
    row_id: RowId
    slot: Slot
    num_known: int = 0
    """New tokens that are known already and are computed again as part of the prompt."""

    @property
    def length(self) -> int:
        """Tokens of the row's prompt pass."""
        return len(self.request.prompt_tokens) + self.num_known


class Admission:
    """Requests wait in order; rows are taken and given back.

    Args:
        num_microbatches, microbatch_rows: the token pipeline's rows.
        prompt_rows: most rows of a prompt microbatch.
        prompt_tokens: most tokens of a prompt microbatch, padding included; a longer prompt goes alone. None: any.
        most_prompts: prompt microbatches under way at once; more would only wait inside the pipeline.
        scheduling: ``row`` refills a row as soon as it is free; ``microbatch`` waits until the whole microbatch is.
    """

    def __init__(
        self,
        *,
        num_microbatches: int,
        microbatch_rows: int,
        prompt_rows: int,
        most_prompts: int,
        scheduling: Scheduling,
        prompt_tokens: int | None = None,
    ) -> None:
        self._microbatch_rows = microbatch_rows
        self._prompt_rows = prompt_rows
        self._prompt_tokens = prompt_tokens
        self._most_prompts = most_prompts
        self._scheduling = scheduling
        self._queue = RequestQueue(prompt_tokens=prompt_tokens, takes_turns=scheduling == "row")
        self._free: list[list[int]] = [list(range(microbatch_rows)) for _ in range(num_microbatches)]
        self._rows: dict[RowId, Assigned] = {}
        self._assigned: deque[Assigned] = deque()
        self._missing: dict[int, set[RowId]] = {}
        self._arrived: dict[int, list[RowId]] = {}
        self._prompts_under_way: set[frozenset[RowId]] = set()
        self._known: dict[RequestId, int] = {}
        self._next_row_id = 1

    @classmethod
    def of(cls, plan: Plan) -> Admission:
        """The admission that the plan's pipelines call for."""
        token, prompt = plan.token_pipeline, plan.prompt_pipeline
        return cls(
            num_microbatches=token.in_flight,
            microbatch_rows=token.microbatch_rows,
            prompt_rows=plan.prompt_rows,
            prompt_tokens=plan.prompt_tokens,
            most_prompts=prompt.depth + 1,
            scheduling=plan.scheduling,
        )

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._queue)

    @property
    def num_rows_taken(self) -> int:
        """Rows that are assigned."""
        return len(self._rows)

    def enqueue(self, request: Request) -> None:
        """The request waits for a row."""
        self._queue.append(request)

    def requeue(self, row_id: RowId, num_known: int = 0) -> Request:
        """The row's attempt is over and its request waits again, first in line, with so many new tokens known.

        It will be alone in its prompt microbatch, so that a prompt which fails by itself takes no other with it again.
        The row itself stays taken until ``free`` says that no stage uses it.
        """
        request = self._rows[row_id].request
        self._queue.put_first(request)
        self._known[request.id] = num_known
        self.withdraw(row_id)
        return request

    def cancel(self, request_id: RequestId) -> RowId | None:
        """The request waits no longer, and a prompt of it that was due is not run.

        Returns its row if it had one whose prompt was due: the caller gives it back, and says that its prompt is done.
        """
        self._known.pop(request_id, None)
        self._queue.remove(request_id)
        for row in self._assigned:
            if row.request.id == request_id:
                self._assigned.remove(row)
                return row.row_id
        return None

    def is_prompting(self, row_id: RowId) -> bool:
        """Whether a prompt microbatch of the row is under way."""
        return any(row_id in row_ids for row_ids in self._prompts_under_way)

    def withdraw(self, row_id: RowId) -> None:
        """The row will not be admitted: its group no longer waits for it."""
        arrived = self._arrived.get(self._rows[row_id].slot.microbatch, [])
        if row_id in arrived:
            arrived.remove(row_id)

    def next_prompt(self) -> tuple[Assigned, ...]:
        """The rows of the next prompt microbatch, under way from now on; empty when there is none to run yet."""
        if len(self._prompts_under_way) >= self._most_prompts:
            return ()
        if not self._assigned:
            self._assign()
        rows = tuple(self._assigned.popleft() for _ in range(self._num_that_fit()))
        if rows:
            self._prompts_under_way.add(frozenset(row.row_id for row in rows))
        return rows

    def prompt_done(self, row_ids: Iterable[RowId], continuing: Iterable[RowId]) -> tuple[tuple[Assigned, ...], ...]:
        """A prompt microbatch has its first tokens (or failed). Returns the groups of rows to admit now.

        Args:
            row_ids: the rows of the prompt microbatch.
            continuing: those of them that the first token did not end.
        """
        self._prompts_under_way.discard(frozenset(row_ids))
        if self._scheduling == "row":
            return tuple((self._rows[row_id],) for row_id in continuing)
        done = set(row_ids)
        # Not by the rows' slots: a row that failed before its first token came may have been given back already.
        for missing in self._missing.values():
            missing -= done
        alone = [row_id for row_id in continuing if self._rows[row_id].slot.microbatch not in self._arrived]
        for row_id in continuing:
            if row_id not in alone:
                self._arrived[self._rows[row_id].slot.microbatch].append(row_id)
        complete = [microbatch for microbatch, missing in self._missing.items() if not missing]
        for microbatch in complete:
            del self._missing[microbatch]
        groups = [tuple(self._rows[row_id] for row_id in self._arrived.pop(microbatch)) for microbatch in complete]
        return tuple(group for group in (*groups, *((self._rows[row_id],) for row_id in alone)) if group)

    def interrupt(self, again: Mapping[RowId, int], gone: Iterable[RowId]) -> None:
        """The cluster begins anew with the rows that it had.

        Args:
            again: rows whose prompts are run again, before all others, with so many new tokens known; each of them
                joins its microbatch by itself.
            gone: rows that ended, whose places no stage will give back any more.
        """
        for row_id in gone:
            self.free(row_id)
        self._prompts_under_way.clear()
        waiting = {row.row_id for row in self._assigned}
        for microbatch, missing in list(self._missing.items()):
            # Rows whose prompts were never sent still arrive together; of the others some may go on at once.
            missing &= waiting
            self._arrived[microbatch] = []
            if not missing:
                del self._missing[microbatch], self._arrived[microbatch]
        for row_id, num_known in again.items():
            self._rows[row_id] = replace(self._rows[row_id], num_known=num_known)
        self._assigned.extendleft(self._rows[row_id] for row_id in reversed(list(again)))

    def reshape(self, plan: Plan, open_rows: Mapping[RowId, int]) -> tuple[RowId, ...]:
        """The rows are those of the plan's pipelines, and each that goes on has its place among them.

        Called before ``interrupt``. Where the shape is the same, so are the places. Where not, the eldest rows have
        places; the others are given up and returned: their requests wait again, before all others, as do those whose
        prompts were not sent yet. ``open_rows``: rows that were sent and have not ended, with their new tokens so far.
        """
        token = plan.token_pipeline
        self._prompt_rows, self._prompt_tokens = plan.prompt_rows, plan.prompt_tokens
        self._queue.prompt_tokens = plan.prompt_tokens
        if (len(self._free), self._microbatch_rows) == (token.in_flight, token.microbatch_rows):
            return ()
        self._microbatch_rows = token.microbatch_rows
        unsent, former = self.unsent, self._rows
        going_on = [row_id for row_id in former if row_id in open_rows and row_id not in unsent][: token.num_rows]
        given_up = [row_id for row_id in former if row_id in unsent or (row_id in open_rows and row_id not in going_on)]
        self._queue.put_back([former[row_id].request for row_id in given_up])
        for row_id in given_up:
            self._known[former[row_id].request.id] = open_rows.get(row_id, former[row_id].num_known)
        self._assigned.clear()
        self._missing.clear()
        self._arrived.clear()
        self._free = [list(range(token.microbatch_rows)) for _ in range(token.in_flight)]
        self._rows = {row_id: replace(former[row_id], slot=self._new_slot()) for row_id in going_on}
        return tuple(given_up)

    @property
    def taken(self) -> tuple[RowId, ...]:
        """Rows that are assigned, whether their prompts were sent or not."""
        return tuple(self._rows)

    @property
    def unsent(self) -> frozenset[RowId]:
        """Rows that are assigned and whose prompts were not sent yet, or are to be sent again."""
        return frozenset(row.row_id for row in self._assigned)

    def free(self, row_id: RowId) -> None:
        """No stage uses the row any more; it can be taken again. Raises InvalidTransition for a row not taken."""
        row = self._rows.pop(row_id, None)
        if row is None:
            raise InvalidTransition(f"row {row_id} given back, but it is not taken")
        free = self._free[row.slot.microbatch]
        free.append(row.slot.row_index)
        free.sort()

    def assigned(self, row_id: RowId) -> Assigned | None:
        """The row's request and slot, or None when the row is not taken."""
        return self._rows.get(row_id)

    def _assign(self) -> None:
        slots = self._row_slots(self._prompt_rows) if self._scheduling == "row" else self._microbatch_slots()
        taken = [self._take(request, slot) for request, slot in zip(self._queue.pick(len(slots)), slots, strict=False)]
        self._assigned.extend(taken)
        if self._scheduling == "microbatch" and taken:
            microbatch = taken[0].slot.microbatch
            self._missing[microbatch] = {row.row_id for row in taken}
            self._arrived[microbatch] = []

    def _microbatch_slots(self) -> list[Slot]:
        for microbatch, free in enumerate(self._free):
            if len(free) == self._microbatch_rows and microbatch not in self._missing:
                return [Slot(microbatch=microbatch, row_index=row) for row in free]
        return []

    def _row_slots(self, most: int) -> list[Slot]:
        free = [list(rows) for rows in self._free]
        slots = []
        for _ in range(most):
            microbatch = max(range(len(free)), key=lambda index: len(free[index]))
            if not free[microbatch]:
                break
            slots.append(Slot(microbatch=microbatch, row_index=free[microbatch].pop(0)))
        return slots

    def _new_slot(self) -> Slot:
        """A free place, taken from now on: rows one by one spread over the microbatches, whole microbatches fill."""
        if self._scheduling == "row":
            (slot,) = self._row_slots(1)
        else:
            microbatch = next(index for index, free in enumerate(self._free) if free)
            slot = Slot(microbatch=microbatch, row_index=self._free[microbatch][0])
        self._free[slot.microbatch].remove(slot.row_index)
        return slot

    def _num_that_fit(self) -> int:
        """How many assigned rows the next prompt microbatch takes; its tensor is as long as its longest prompt."""
        longest = count = 0
        for row in self._assigned:
            longest = max(longest, row.length)
            is_over = self._prompt_tokens is not None and (count + 1) * longest > self._prompt_tokens
            if count == self._prompt_rows or (count and is_over):
                break
            count += 1
        return count

    def _take(self, request: Request, slot: Slot) -> Assigned:
        self._free[slot.microbatch].remove(slot.row_index)
        num_known = self._known.pop(request.id, 0)
        row = Assigned(request=request, row_id=RowId(self._next_row_id), slot=slot, num_known=num_known)
        self._next_row_id += 1
        self._rows[row.row_id] = row
        return row
