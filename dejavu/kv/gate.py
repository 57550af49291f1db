"""What every receiver of KV asks of a message before it lands: whose it is, of when, and whether it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dejavu.ids import Epoch
from dejavu.kv.chunk import ChunkCorrupt, ChunkHeader, KvMessage, verify, why_misfit
from dejavu.kv.layout import KvLayout
from dejavu.kv.route import Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A chunk and why it may not land: ``stale`` or ``corrupt`` say so, at most one of them."""

    chunk: ChunkHeader
    payload: memoryview
    stale: str | None = None
    corrupt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Lets through what belongs to one holding of one cluster in one epoch. Any thread; holds no lock."""

    cluster: str
    epoch: Epoch
    layout: KvLayout
    holding: Holding

    def judge(self, message: KvMessage, payload: memoryview) -> Iterator[Judged]:
        """Every chunk of the message with its part of the payload and its verdict. Raises nothing for bad bytes."""
        if message.cluster != self.cluster:
            reason = f"cluster {message.cluster!r}, here {self.cluster!r}"
            for chunk in message.chunks:
                yield Judged(chunk=chunk, payload=payload, stale=reason)
        elif message.num_bytes != payload.nbytes:
            reason = f"a payload of {payload.nbytes} bytes, {message.num_bytes} announced"
            for chunk in message.chunks:
                yield Judged(chunk=chunk, payload=payload, corrupt=reason)
        else:
            offset = 0
            for chunk in message.chunks:
                yield self._judge_chunk(chunk, payload[offset : offset + chunk.num_bytes])
                offset += chunk.num_bytes

    def _judge_chunk(self, chunk: ChunkHeader, payload: memoryview) -> Judged:
        try:
            # First of all: nothing that a corrupt header says may be believed.
            verify(chunk, payload)
        except ChunkCorrupt as error:
            return Judged(chunk=chunk, payload=payload, corrupt=str(error))
        if chunk.epoch != self.epoch:
            return Judged(chunk=chunk, payload=payload, stale=f"epoch {chunk.epoch}, here {self.epoch}")
        misfit = why_misfit(chunk, self.layout, self.holding.layers, self.holding.heads)
        return Judged(chunk=chunk, payload=payload, corrupt=misfit)
