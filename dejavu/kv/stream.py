"""Level 3 of DéjàVuLib: from the inference setup, find who owns what, split or merge (DejaVu, table 1: stream_out/in).

Shape legend: B rows of a pass, L layers, C the pair (K, V), H kv heads, T positions of a pass, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import KvMessage, StepMark, encode_message
from dejavu.kv.device import Copier, CpuCopier, Mark
from dejavu.kv.flush import Destination, RemoteMemory, Sender, flush
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.route import Move, RowSpan, route_from
from dejavu.kv.scatter import Region, Staged, pool_region, scatter
from dejavu.kv.staging import StagingRing, StagingTimeout
from dejavu.kv.steps import one_gather, scatter_step
from dejavu.kv.stream_setup import PoolRow, StreamSetup

RegionsByOwner: TypeAlias = Mapping[str, Sequence[Region]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What ``stream_out`` has handed over: a future for each message, and what all carry."""

    sends: tuple[Future[None], ...]
    num_chunks: int
    num_bytes: int

    @property
    def num_messages(self) -> int:
        """One for each future."""
        return len(self.sends)


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedRow:
    """A row whose coverage is proven: ``cells_LCHTD`` holds positions [0, length) of all these layers and heads."""

    row_id: RowId
    length: int
    layers: LayerRange
    heads: tuple[int, int]
    cells_LCHTD: Tensor
    memory: Tensor
    """The bytes under the cells, for ``KvInbox.recycle``."""


def stream_out(
    layer: int,
    keys_BHTD: Tensor,
    values_BHTD: Tensor,
    rows: Sequence[RowSpan],
    setup: StreamSetup,
    staging: StagingRing,
    sender: Sender,
    *,
    copier: Copier | None = None,
    after: Mark = None,
    timeout_s: float = 60.0,
) -> Streamed:
    """One layer of a batch of rows is on its way to its owners, one message (or few large ones) for each of them.

    ``layer`` is a global number. ``rows[i]`` names row i of the batch: position ``rows[i].start`` lies at index 0
    of T, and only its ``length`` positions leave, never the padding. H are the source's heads.
    Blocks only while no staging buffer is free; buffers return to the ring as their sends resolve.
    Raises RouteError when the targets do not own every cell once, StagingTimeout, ConfigError (see ``scatter``),
    ValueError for tensors that are not of this setup, and what ``sender`` raises.
    """
    by_owner = layer_regions(layer, keys_BHTD, values_BHTD, rows, setup)
    return stream_regions(by_owner, setup, staging, sender, copier=copier, after=after, timeout_s=timeout_s)


def stream_out_rows(
    pool: KvPool,
    rows: Sequence[PoolRow],
    setup: StreamSetup,
    staging: StagingRing,
    sender: Sender,
    *,
    layers: LayerRange | None = None,
    copier: Copier | None = None,
    after: Mark = None,
    timeout_s: float = 60.0,
    mark: StepMark | None = None,
) -> Streamed:
    """Positions of some of the pool's rows, in all its layers or in ``layers``, are on their way to their owners.

    Steps of a microbatch are the same few positions of each of its rows; ``mark`` names the newest and goes with the
    last message to each owner. As ``stream_out`` otherwise.
    Raises IndexError for cells outside the pool as well.
    """
    layers = layers or setup.source.layers
    source = setup.source_of(layers)
    length, owners = one_gather(pool, rows, source, setup.targets, staging.buffer_bytes)
    if owners is None:
        by_owner = pool_regions(pool, rows, setup, layers)
        return stream_regions(
            by_owner, setup, staging, sender, copier=copier, after=after, timeout_s=timeout_s, mark=mark
        )
    cells = [(row.span.row_id, row.row_index, row.span.start) for row in rows]
    handed = _HandedOver()
    for owner, owned_layers, heads in owners:
        messages = scatter_step(
            pool,
            cells,
            staging,
            layers=owned_layers,
            heads=heads,
            cluster=setup.cluster,
            epoch=setup.epoch,
            copier=copier or CpuCopier(),
            length=length,
            after=after,
            timeout_s=timeout_s,
        )
        handed.all_over(messages, setup, RemoteMemory(owner=owner, sender=sender), mark)
    return handed.streamed()


def layer_regions(
    layer: int, keys_BHTD: Tensor, values_BHTD: Tensor, rows: Sequence[RowSpan], setup: StreamSetup
) -> RegionsByOwner:
    """The cells of one layer of a batch by who owns them in the end; nothing is copied. See ``stream_out``."""
    _check_shapes(keys_BHTD, values_BHTD, rows, setup)
    batch_index = {span.row_id: index for index, span in enumerate(rows)}
    by_owner: dict[str, list[Region]] = {}
    for move in route_from(setup.source_of(LayerRange(layer, layer + 1)), setup.targets, rows):
        index = batch_index[move.row_id]
        region = _region(move, keys_BHTD[index], values_BHTD[index], rows[index].start, setup.source.heads[0])
        by_owner.setdefault(move.target, []).append(region)
    return by_owner


def pool_regions(pool: KvPool, rows: Sequence[PoolRow], setup: StreamSetup, layers: LayerRange) -> RegionsByOwner:
    """The rows' cells by who owns them in the end; nothing is copied. See ``stream_out_rows``."""
    row_index = {row.span.row_id: row.row_index for row in rows}
    by_owner: dict[str, list[Region]] = {}
    for move in route_from(setup.source_of(layers), setup.targets, [row.span for row in rows]):
        region = pool_region(
            pool,
            row_index[move.row_id],
            move.row_id,
            layers=move.layers,
            heads=move.heads,
            positions=move.positions,
        )
        by_owner.setdefault(move.target, []).append(region)
    return by_owner


def stream_regions(
    by_owner: RegionsByOwner,
    setup: StreamSetup,
    staging: StagingRing,
    sender: Sender,
    *,
    merged: bool = True,
    copier: Copier | None = None,
    after: Mark = None,
    timeout_s: float = 60.0,
    mark: StepMark | None = None,
) -> Streamed:
    """Every region is on its way to its owner, gathered into few messages.

    Not ``merged``, every contiguous piece is a message of its own and is awaited (the baseline of DejaVu, Fig. 11).
    Raises StagingTimeout, ConfigError (see ``scatter``), what ``sender`` raises and, not merged, what a send raises.
    """
    handed = _HandedOver()
    for owner, regions in by_owner.items():
        destination = RemoteMemory(owner=owner, sender=sender)
        batches = [regions] if merged else [[piece] for region in regions for piece in region.pieces()]
        for number, batch in enumerate(batches, start=1):
            messages = scatter(
                batch,
                staging,
                cluster=setup.cluster,
                epoch=setup.epoch,
                dtype=setup.layout.dtype,
                copier=copier,
                after=after,
                timeout_s=timeout_s,
            )
            if merged:
                handed.all_over(messages, setup, destination, mark)
                continue
            last_mark = mark if number == len(batches) else None
            for staged in messages:
                _await(handed.over(staged, setup, destination, last_mark), staged.num_bytes, timeout_s)
    return handed.streamed()


def _await(sent: Future[None], num_bytes: int, timeout_s: float) -> None:
    if not wait((sent,), timeout_s).done:
        raise StagingTimeout(f"a piece of {num_bytes} bytes had not left after {timeout_s} s")
    sent.result()


class _HandedOver:
    """Messages as they are handed over."""

    def __init__(self) -> None:
        self._sends: list[Future[None]] = []
        self._num_chunks = 0
        self._num_bytes = 0

    def all_over(
        self, messages: Iterator[Staged], setup: StreamSetup, destination: Destination, mark: StepMark | None
    ) -> None:
        """The messages are on their way, the last one with the mark."""
        if mark is None:
            for staged in messages:
                self.over(staged, setup, destination)
            return
        last = next(messages, None)
        if last is None:
            return
        try:
            for staged in messages:
                # Its place is taken first: should handing over fail, the buffer that is still held is the new one.
                before, last = last, staged
                self.over(before, setup, destination)
        except BaseException:
            last.buffer.release()
            raise
        self.over(last, setup, destination, mark)

    def over(
        self, staged: Staged, setup: StreamSetup, destination: Destination, mark: StepMark | None = None
    ) -> Future[None]:
        """The message is on its way."""
        sent = flush_staged(staged, setup.cluster, setup.epoch, destination, mark)
        self._sends.append(sent)
        self._num_chunks += len(staged.chunks)
        self._num_bytes += staged.num_bytes
        return sent

    def streamed(self) -> Streamed:
        """All of them."""
        return Streamed(sends=tuple(self._sends), num_chunks=self._num_chunks, num_bytes=self._num_bytes)


def flush_staged(
    staged: Staged, cluster: str, epoch: Epoch, destination: Destination, mark: StepMark | None = None
) -> Future[None]:
    """A staged message is on its way; its buffer goes back to the ring as the returned future resolves."""
    try:
        header = encode_message(KvMessage(cluster=cluster, epoch=epoch, chunks=staged.chunks, step=mark))
        sent = flush(header, staged.payload, destination)
    except BaseException:
        staged.buffer.release()
        raise
    sent.add_done_callback(lambda _: staged.buffer.release())
    return sent


def stream_in(landed: LandedRow, pool: KvPool, row_index: int) -> None:
    """The pool's row holds the landed row at positions [0, length); what lies beyond is as it was.

    The row's bytes cross to the pool's device in one copy and are spread over the layers there.
    Raises ValueError when the row is not whole for this pool: other layers, other heads or another dtype.
    """
    held = (pool.layers, pool.heads, pool.cells_LCRHSD.dtype)
    came = (landed.layers, landed.heads, landed.cells_LCHTD.dtype)
    if held != came:
        raise ValueError(f"row {landed.row_id} landed as {came}, the pool holds {held}")
    with torch.inference_mode():
        target = pool.cells(row_index, pool.layers, pool.heads, (0, landed.length))
        target.copy_(landed.cells_LCHTD.to(pool.device))


def _region(move: Move, keys_HTD: Tensor, values_HTD: Tensor, first_position: int, first_head: int) -> Region:
    heads = slice(move.heads[0] - first_head, move.heads[1] - first_head)
    positions = slice(move.positions[0] - first_position, move.positions[1] - first_position)
    return Region(
        row_id=move.row_id,
        layers=move.layers,
        heads=move.heads,
        positions=move.positions,
        parts=(keys_HTD[heads, positions][None, None], values_HTD[heads, positions][None, None]),
    )


def _check_shapes(keys_BHTD: Tensor, values_BHTD: Tensor, rows: Iterable[RowSpan], setup: StreamSetup) -> None:
    lengths = [span.length for span in rows]
    num_heads = setup.source.heads[1] - setup.source.heads[0]
    dtype = f"torch.{setup.layout.dtype}"
    for name, tensor in (("keys", keys_BHTD), ("values", values_BHTD)):
        num_rows, heads, num_positions, head_dim = tensor.shape
        fits = num_rows == len(lengths) and heads == num_heads and head_dim == setup.layout.head_dim
        if not fits or num_positions < max(lengths, default=0) or str(tensor.dtype) != dtype:
            raise ValueError(
                f"{name} are {tuple(tensor.shape)} of {tensor.dtype}; {len(lengths)} rows of up to "
                f"{max(lengths, default=0)} positions, {num_heads} heads of {setup.layout.head_dim}, {dtype} expected"
            )
