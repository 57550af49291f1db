"""Level 2 of DéjàVuLib: non-contiguous regions to contiguous sealed chunks and back (DejaVu, table 1: scatter, gather).

Shape legend: L layers, C the pair (K, V), H kv heads, T positions of a region, S positions of a buffer, D head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

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
from dejavu.kv.staging import Staging, StagingBuffer

_CHUNK_BYTES: Final = 4 * 1024 * 1024
"""A larger chunk would have left the cache before its checksum is computed."""


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
    staging: Staging,
    *,
    cluster: str,
    epoch: Epoch,
    dtype: str,
    copier: Copier | None = None,
    after: Mark = None,
    timeout_s: float = 60.0,
) -> Iterator[Staged]:
    """Yields messages that hold every cell of the regions once, gathered into staging buffers and sealed.

    As many regions share a message as its buffer and header take; one that is larger than a buffer, or than a chunk
    should be, is cut by positions. Blocks while no buffer is free. Raises StagingTimeout, or ConfigError when a buffer
    cannot hold even one position.
    """
    for batch in _batches(regions, staging.buffer_bytes, max_chunks(cluster)):
        buffer = staging.acquire(timeout_s)
        try:
            chunks = _gathered(batch, buffer, epoch, dtype, copier or CpuCopier(), after)
        except BaseException:
            buffer.release()
            raise
        yield Staged(buffer=buffer, chunks=chunks, num_bytes=sum(chunk.num_bytes for chunk in chunks))


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
            piece_bytes = piece.nbytes
            if batch and (batch_bytes + piece_bytes > buffer_bytes or len(batch) == most_chunks):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(piece)
            batch_bytes += piece_bytes
    if batch:
        yield batch


def _cut_to_fit(region: Region, buffer_bytes: int) -> Iterable[Region]:
    region_bytes = region.nbytes
    most_bytes = min(buffer_bytes, _CHUNK_BYTES)
    if region_bytes <= most_bytes:
        return (region,)
    position_bytes = region_bytes // region.num_positions
    if position_bytes > buffer_bytes:
        raise ConfigError(
            f"one position of layers [{region.layers.start},{region.layers.stop}) heads {list(region.heads)} takes "
            f"{position_bytes} bytes, a staging buffer {buffer_bytes}: use larger staging buffers"
        )
    return region.cut(max(1, most_bytes // position_bytes))


def _gathered(
    batch: Sequence[Region], buffer: StagingBuffer, epoch: Epoch, dtype: str, copier: Copier, after: Mark
) -> tuple[ChunkHeader, ...]:
    """The regions lie in the buffer's host memory, one after the other, under these headers."""
    on_host = buffer.work is buffer.host and not any(part.is_cuda for region in batch for part in region.parts)
    chunks: list[ChunkHeader] = []
    ends: list[int] = []
    offset = 0
    # Inference mode, because the models' tensors are inference tensors and autograd has no business here.
    with torch.inference_mode(), copier.copying(after):
        for region in batch:
            begin, offset = offset, _fill(buffer.work, offset, region)
            ends.append(offset)
            if on_host:
                # At once, while the bytes are in the cache.
                chunks.append(_seal(region, buffer.payload(offset)[begin:], epoch, dtype))
        buffer.copy_to_host(offset)
    if not on_host:
        begins = (0, *ends[:-1])
        payload = buffer.payload(offset)
        chunks += [
            _seal(region, payload[begin:end], epoch, dtype)
            for region, begin, end in zip(batch, begins, ends, strict=True)
        ]
    return tuple(chunks)


def _fill(work: Tensor, offset: int, region: Region) -> int:
    """The region's cells lie from ``offset`` on (on a CUDA stream: will lie); returns where they end."""
    for part in region.parts:
        stop = offset + part.nbytes
        work[offset:stop].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
        offset = stop
    return offset


def _seal(region: Region, payload: memoryview, epoch: Epoch, dtype: str) -> ChunkHeader:
    return seal(
        epoch=epoch,
        row_id=region.row_id,
        layers=region.layers,
        heads=region.heads,
        positions=region.positions,
        dtype=dtype,
        payload=payload,
        kinds=region.kinds,
    )
