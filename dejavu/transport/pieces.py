"""How a payload of any number of buffers becomes few transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dejavu.transport.base import Buffer

_OWN_PIECE_BYTES = 64 * 1024
"""A buffer this large is sent where it lies; smaller neighbours are packed, as a piece costs more than the copy."""
_PACKED_BYTES = 1024 * 1024


def as_bytes(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """The same memory as flat views of bytes, empty ones left out. Raises ValueError for memory with gaps."""
    views = []
    for index, buffer in enumerate(buffers):
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ValueError(
                f"payload buffer {index} is not C-contiguous: strides {view.strides} of shape {view.shape}"
            )
        if view.nbytes:
            views.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
    return tuple(views)


def pieces_of(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Non-empty, flat buffers, in the same order: large ones as they are, runs of small ones copied together."""
    return tuple(_pieces(buffers))


def _pieces(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    run: list[Buffer] = []
    run_bytes = 0
    for buffer in buffers:
        if run and (buffer.nbytes >= _OWN_PIECE_BYTES or run_bytes + buffer.nbytes > _PACKED_BYTES):
            yield _packed(run)
            run, run_bytes = [], 0
        if buffer.nbytes >= _OWN_PIECE_BYTES:
            yield buffer
            continue
        run.append(buffer)
        run_bytes += buffer.nbytes
    if run:
        yield _packed(run)


def _packed(run: Sequence[Buffer]) -> Buffer:
    return run[0] if len(run) == 1 else memoryview(b"".join(run))
