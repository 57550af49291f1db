"""Bandwidth of DéjàVuLib's gather and flush by chunk size, against the bare medium, as tables of medians of one run.

    python tools/bench_primitives.py [--folder FOLDER] [--rounds 5] [--sample-mb 256] [--message-mb 4]
        [--chunk-kb 4 64 1024]

A chunk is some positions of one layer of a pool's row: 16 strided pieces, K and V of 8 heads. Each is gathered into a
staging buffer, sealed with its checksum and flushed, as many in a message as --message-mb holds (0: each is a message
of its own). Larger messages hold one. Against it stands the medium alone, in the same rounds, in turns, moving the
same memory, which no cache holds:

- local: the C library's memcpy, 4 MB or a chunk at a time; a gather goes to lent memory, so it is one copy and a
  checksum
- remote: messages of 16 MB of UCX alone, between the same two processes; both end when the other side has the last one
- disk: sequential writes of 4 MB, O_DIRECT or through the page cache as the DiskMemory beside it; both end with
  fdatasync

One thread gathers; a transport and a disk each have one more. On two cores a remote medium alone takes nearly both:
what gathering and sealing cost is then missing from the bandwidth. ``gather`` and ``seal`` are the two steps before a
flush, each by itself.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from primitive_media import DTYPE, EPOCH, POSITION_BYTES, Chunks, Disk, Local, Medium, timed
from primitive_remote import Remote

from dejavu.kv.chunk import seal
from dejavu.kv.staging import StagingRing

_STAGING_BYTES = 8 << 20
"""In all, but at least four buffers: enough that a disk finds several messages to write together."""
_CHUNK_KB = (4, 16, 64, 256, 1024, 4096, 16384)


def gather_only(chunks: Chunks, staging: StagingRing) -> float:
    """Seconds of copying every chunk into one staging buffer."""
    buffer = staging.acquire(0)

    def work() -> None:
        for region in chunks:
            (part,) = region.parts
            buffer.work[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)

    seconds = timed(work)
    buffer.release()
    return seconds


def seal_only(chunks: Chunks, staging: StagingRing) -> float:
    """Seconds of the headers and checksums of as many chunks, all of the same bytes."""
    buffer = staging.acquire(0)
    payload = buffer.payload(chunks.chunk_bytes)

    def work() -> None:
        for region in chunks:
            seal(
                epoch=EPOCH,
                row_id=region.row_id,
                layers=region.layers,
                heads=region.heads,
                positions=region.positions,
                dtype=DTYPE,
                payload=payload,
            )

    seconds = timed(work)
    buffer.release()
    return seconds


class Table:
    """Bandwidths of every round, by row and column."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, row: str, column: str, num_bytes: int, seconds: float) -> None:
        """One more round has been measured."""
        self._samples[row, column].append(num_bytes / seconds / 1e9)

    def median(self, row: str, column: str) -> float:
        """GB/s."""
        return statistics.median(self._samples[row, column])


def measure(
    media: Sequence[Medium], chunk_sizes: Sequence[int], sample_bytes: int, message_bytes: int, rounds: int
) -> Table:
    """Every medium and size has been measured in every round, after one round that does not count."""
    table = Table()
    # Else the collector walks the heap of PyTorch's import again and again, because of the futures of small chunks.
    gc.collect()
    gc.freeze()
    for size in chunk_sizes:
        # Whole chunks only, or the messages of one size would be as different as its remainder.
        buffer_bytes = max(1, message_bytes // size) * size
        chunks = Chunks(size, sample_bytes)
        staging = StagingRing(max(4, _STAGING_BYTES // buffer_bytes), buffer_bytes)
        for number in range(rounds + 1):
            seconds = {
                ("steps", "gather"): (chunks.num_bytes, gather_only(chunks, staging)),
                ("steps", "seal"): (chunks.num_bytes, seal_only(chunks, staging)),
            }
            for medium in media:
                # In turns, because what comes first finds a rested disk and colder caches.
                for column in ("raw", "moved") if number % 2 else ("moved", "raw"):
                    seconds[medium.name, column] = (
                        medium.raw(chunks) if column == "raw" else medium.moved(chunks, staging)
                    )
            if number:
                for (row, column), (num_bytes, duration_s) in seconds.items():
                    table.add(f"{row} {size}", column, num_bytes, duration_s)
    return table


def print_tables(table: Table, media: Sequence[Medium], chunk_sizes: Sequence[int]) -> None:
    """Markdown, one table for each medium."""
    for medium in media:
        print(f"\n{medium.name}\n\n| chunk KB | medium alone GB/s | gather+flush GB/s | ratio |")
        print("|---:|---:|---:|---:|")
        for size in chunk_sizes:
            raw, moved = (table.median(f"{medium.name} {size}", column) for column in ("raw", "moved"))
            print(f"| {size >> 10} | {raw:.2f} | {moved:.2f} | {moved / raw:.2f} |")
    print("\nsteps before a flush\n\n| chunk KB | gather GB/s | seal GB/s |\n|---:|---:|---:|")
    for size in chunk_sizes:
        gather, seal_ = (table.median(f"steps {size}", column) for column in ("gather", "seal"))
        print(f"| {size >> 10} | {gather:.2f} | {seal_:.2f} |")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (default: the current one)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample-mb", type=float, default=256, help="what one measurement moves, at most")
    parser.add_argument("--message-mb", type=float, default=4, help="what a message holds, or one chunk if larger")
    parser.add_argument("--chunk-kb", type=int, nargs="+", default=_CHUNK_KB, help="multiples of 4")
    arguments = parser.parse_args()
    chunk_sizes = [size_kb << 10 for size_kb in arguments.chunk_kb]
    if any(size <= 0 or size % POSITION_BYTES for size in chunk_sizes):
        parser.error(f"--chunk-kb: {arguments.chunk_kb} are not all multiples of {POSITION_BYTES >> 10}")
    sample_bytes, message_bytes = (int(mb * (1 << 20)) for mb in (arguments.sample_mb, arguments.message_mb))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        media: list[Medium] = [
            Local(sample_bytes, chunk_sizes),
            Remote(),
            Disk(Path(folder)),
        ]
        table = measure(media, chunk_sizes, sample_bytes, message_bytes, arguments.rounds)
        for medium in media:
            medium.close()
    print_tables(table, media, chunk_sizes)


if __name__ == "__main__":
    main()
