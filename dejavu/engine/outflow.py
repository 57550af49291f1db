"""All KV that leaves a stage: prompts to the stages that own their rows, copies to where the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from dejavu.control.ring import StepRow
from dejavu.engine.copies import Copies
from dejavu.engine.messages import KvPart, PromptRow
from dejavu.ids import RowId
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.route import RowSpan
from dejavu.kv.stream_account import StreamStalled
from dejavu.kv.streamer import Streamer


class Outflow:
    """Main thread only. Either part may be missing: then its calls do nothing.

    Args:
        handoff: of a prompt stage: its KV goes to the token stages.
        copies: of a stage that keeps rows, where the plan has a place for copies of them.
    """

    def __init__(self, *, handoff: Streamer | None = None, copies: Copies | None = None) -> None:
        self._handoff = handoff
        self._copies = copies

    @property
    def handoffs(self) -> tuple[Streamer, ...]:
        """The streamer of prompts to other stages' pools, where there is one."""
        return () if self._handoff is None else (self._handoff,)

    @property
    def copiers(self) -> tuple[Streamer, ...]:
        """The streamer of copies, where there is one."""
        return () if self._copies is None else (self._copies.streamer,)

    @property
    def streamers(self) -> tuple[Streamer, ...]:
        """Those that are there."""
        return (*self.handoffs, *self.copiers)

    def set_level(self, level: StreamingLevel) -> None:
        """From the next pass on."""
        if self._copies is not None:
            self._copies.flush()
        for streamer in self.streamers:
            streamer.set_level(level)

    def begin(self, places: frozenset[int]) -> None:
        """These rows of the pool may be written to."""
        if self._copies is not None:
            self._copies.begin(places)

    def on_layer(self, rows: Sequence[PromptRow]) -> Callable[[int, Tensor, Tensor], None] | None:
        """What is to be told of each prompt layer that exists, if anything."""
        handoff = self._handoff
        if handoff is None:
            return None
        spans = [RowSpan(row_id=row.row_id, length=row.length) for row in rows]
        return lambda layer, keys, values: handoff.submit(layer, keys, values, spans)

    def on_written(self, rows: Sequence[PromptRow]) -> Callable[[int], None] | None:
        """What is to be told of each prompt layer that is in the pool, if anything."""
        return None if self._copies is None else self._copies.layer_hook(rows)

    def end_pass(self) -> None:
        """A prompt pass is over."""
        for streamer in self.streamers:
            streamer.end_pass()

    def abandon_pass(self) -> None:
        """A prompt pass has failed: what has not left will not."""
        for streamer in self.streamers:
            streamer.abandon_pass()

    def drain(self, timeout_s: float) -> None:
        """What has been submitted has left, unless that takes longer."""
        if self._copies is not None:
            self._copies.flush()
        for streamer in self.streamers:
            with suppress(StreamStalled):
                streamer.drain(timeout_s)

    def prompts(self, row_ids: Sequence[RowId]) -> None:
        """Whole prompts that were computed elsewhere are in the pool."""
        if self._copies is not None:
            self._copies.prompts(row_ids)

    def again(self, spans: Sequence[tuple[RowId, int, int]]) -> None:
        """Positions [start, stop) of these rows are copied again."""
        if self._copies is not None and spans:
            self._copies.again(spans)

    def step(self, microbatch: int, step: int, rows: Sequence[StepRow]) -> None:
        """Each of the rows has one more cell in every layer."""
        if self._copies is not None:
            self._copies.step(microbatch, step, rows)

    def release(self, row_ids: Sequence[RowId]) -> None:
        """The rows have ended."""
        if self._copies is not None:
            self._copies.release(row_ids)

    def send_again(self, parts: Sequence[KvPart]) -> tuple[RowId, ...]:
        """The parts leave once more. Returns the rows of a handoff that are not kept any more: they must be computed.

        A copy that cannot be sent again stays incomplete and harms nobody.
        """
        if self._copies is not None:
            self._copies.send_again(parts)
        gone: dict[RowId, None] = {}
        if self._handoff is not None:
            # A layer leaves whole, however many of its chunks came corrupt.
            for row_id, layers in dict.fromkeys((part.row_id, part.layers) for part in parts):
                jobs = self._handoff.retained(row_id, layers)
                if jobs is None:
                    gone[row_id] = None
                else:
                    self._handoff.send_again(jobs)
        return tuple(gone)

    def close(self) -> None:
        """Threads and files are gone."""
        if self._handoff is not None:
            self._handoff.close()
        if self._copies is not None:
            self._copies.close()
