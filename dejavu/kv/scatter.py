"""Level 2 of DéjàVuLib: non-contiguous regions to contiguous sealed chunks and back (DejaVu, table 1: scatter, gather).

Shape legend: L layers, C the pair (K, V), H kv heads, T positions of a region, S positions of a buffer, D head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dejavu.errors import ConfigError
from dejavu.ids import Epoch, RowId
from dejavu.kv.box import BOTH, Span
from dejavu.kv.chunk import ChunkHeader, max_chunks, seal
from dejavu.kv.device import Copier, CpuCopier, Mark
from dejavu.kv.flush import bytes_tensor
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.staging import StagingBuffer, StagingRing


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of one row's cells, wherever they lie. ``parts`` [l, c, H, T, D] make up [L, C, H, T, D] in order.

    C is the pair (K, V) unless ``kinds`` says one of them.
    """

    row_id: RowId
    layers: LayerRange
    heads: Span
    positions: Span
    parts: tuple[Tensor, ...]
    kinds: Span = BOTH

    @property
    def num_positions(self) -> int:
        """T."""
        return self.positions[1] - self.positions[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return sum(part.nbytes for part in self.parts)

    def cut(self, num_positions: int) -> Iterator[Region]:
        """The same cells as regions of at most ``num_positions`` positions each."""
        for start in range(0, self.num_positions, num_positions):
            length = min(num_positions, self.num_positions - start)
            yield replace(
                self,
                positions=(self.positions[0] + start, self.positions[0] + start + length),
                parts=tuple(part.narrow(3, start, length) for part in self.parts),
            )

    def pieces(self) -> Iterator[Region]:
        """The same cells as the contiguous pieces of memory in which they lie: a layer, K or V, a head each.

        Where even a head's positions are apart, a position each.
        """
        layer, kind = self.layers.start, self.kinds[0]
        for part in self.parts:
            for in_layer, in_kind in itertools.product(range(part.shape[0]), range(part.shape[1])):
                for head in range(part.shape[2]):
                    piece = replace(
                        self,
                        layers=LayerRange(layer + in_layer, layer + in_layer + 1),
                        kinds=(kind + in_kind, kind + in_kind + 1),
                        heads=(self.heads[0] + head, self.heads[0] + head + 1),
                        parts=(part[in_layer, in_kind, head][None, None, None],),
                    )
                    yield from (piece,) if piece.parts[0].is_contiguous() else piece.cut(1)
            layer, kind = _behind(self, layer, kind, part)


def pool_region(
    pool: KvPool, row_index: int, row_id: RowId, *, layers: LayerRange, heads: Span, positions: Span
) -> Region:
    """The cells of a pool's row, uncopied. Raises IndexError outside the pool."""
    cells = pool.cells(row_index, layers, heads, positions)
    return Region(row_id=row_id, layers=layers, heads=heads, positions=positions, parts=(cells,))


def _behind(region: Region, layer: int, kind: int, part: Tensor) -> tuple[int, int]:
    """Where the part after ``part`` begins: the other kind of the same layers, or the next layers."""
    kind += part.shape[1]
    return (layer, kind) if kind < region.kinds[1] else (layer + part.shape[0], region.kinds[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A full message in a staging buffer; whoever gets it releases the buffer."""

    buffer: StagingBuffer
    chunks: tuple[ChunkHeader, ...]
    num_bytes: int

    @property
    def payload(self) -> memoryview:
        """The chunks' bytes, one after the other."""
        return self.buffer.payload(self.num_bytes)


def scatter(
    regions: Sequence[Region],
    staging: StagingRing,
    *,
    cluster: str,
    epoch: Epoch,
    dtype: str,
    copier: Copier | None = None,
    after: Mark = None,
    timeout_s: float = 60.0,
) -> Iterator[Staged]:
    """Yields messages that hold every cell of the regions once, gathered into staging buffers and sealed.

    As many regions share a message as its buffer and header take; one that is larger than a buffer is cut by
    positions. Blocks while no buffer is free. Raises StagingTimeout, or ConfigError when a buffer cannot hold even
    one position.
    """
    for batch in _batches(regions, staging.buffer_bytes, max_chunks(cluster)):
        buffer = staging.acquire(timeout_s)
        try:
            # Inference mode, because the models' tensors are inference tensors and autograd has no business here.
            with torch.inference_mode(), (copier or CpuCopier()).copying(after):
                num_bytes = _fill(buffer.work, batch)
                buffer.copy_to_host(num_bytes)
            chunks = _seal(batch, buffer.payload(num_bytes), epoch, dtype)
        except BaseException:
            buffer.release()
            raise
        yield Staged(buffer=buffer, chunks=chunks, num_bytes=num_bytes)


def gather(header: ChunkHeader, payload: memoryview, cells_LCHSD: Tensor, *, first: tuple[int, int, int]) -> None:
    """A chunk's cells are at their places in ``cells_LCHSD`` (any strides, any device), whose first layer, head and
    position are ``first``.

    The bytes are taken as they are: verify the chunk before. Raises IndexError for cells outside the tensor.
    """
    layers = (header.layers.start - first[0], header.layers.stop - first[0])
    heads = (header.heads[0] - first[1], header.heads[1] - first[1])
    positions = (header.positions[0] - first[2], header.positions[1] - first[2])
    limits = (cells_LCHSD.shape[0], cells_LCHSD.shape[2], cells_LCHSD.shape[3])
    for name, span, limit in zip(("layers", "heads", "positions"), (layers, heads, positions), limits, strict=True):
        if not 0 <= span[0] < span[1] <= limit:
            raise IndexError(f"row {header.row_id}: {name} {list(span)} lie outside the target's {limit}")
    with torch.inference_mode():
        target = cells_LCHSD[slice(*layers), slice(*header.kinds), slice(*heads), slice(*positions)]
        target.copy_(bytes_tensor(payload).view(cells_LCHSD.dtype).view(target.shape))


def _batches(regions: Sequence[Region], buffer_bytes: int, most_chunks: int) -> Iterator[list[Region]]:
    batch: list[Region] = []
    batch_bytes = 0
    for region in regions:
        for piece in _cut_to_fit(region, buffer_bytes):
            if batch and (batch_bytes + piece.nbytes > buffer_bytes or len(batch) == most_chunks):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(piece)
            batch_bytes += piece.nbytes
    if batch:
        yield batch


def _cut_to_fit(region: Region, buffer_bytes: int) -> Iterator[Region]:
    if region.nbytes <= buffer_bytes:
        return iter((region,))
    position_bytes = region.nbytes // region.num_positions
    if position_bytes > buffer_bytes:
        raise ConfigError(
            f"one position of layers [{region.layers.start},{region.layers.stop}) heads {list(region.heads)} takes "
            f"{position_bytes} bytes, a staging buffer {buffer_bytes}: use larger staging buffers"
        )
    return region.cut(buffer_bytes // position_bytes)


def _fill(work: Tensor, batch: Sequence[Region]) -> int:
    offset = 0
    for region in batch:
        for part in region.parts:
            work[offset : offset + part.nbytes].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
            offset += part.nbytes
    return offset


def _seal(batch: Sequence[Region], payload: memoryview, epoch: Epoch, dtype: str) -> tuple[ChunkHeader, ...]:
    chunks: list[ChunkHeader] = []
    offset = 0
    for region in batch:
        chunk = seal(
            epoch=epoch,
            row_id=region.row_id,
            layers=region.layers,
            heads=region.heads,
            positions=region.positions,
            dtype=dtype,
            payload=payload[offset : offset + region.nbytes],
            kinds=region.kinds,
        )
        chunks.append(chunk)
        offset += region.nbytes
    return tuple(chunks)
