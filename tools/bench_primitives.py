"""Bandwidth of DéjàVuLib's gather and flush by chunk size, against the bare medium, as tables of medians of one run.

    python tools/bench_primitives.py [--folder FOLDER] [--rounds 5] [--sample-mb 64] [--chunk-kb 4 64 1024]

A chunk is some positions of one layer of a pool's row: 16 strided pieces, K and V of 8 heads. Each is gathered into a
staging buffer, sealed with its checksum and flushed as a message of its own. Against it stand, in the same rounds:

- local: one plain copy of memory (a gather and flush is two copies and a checksum)
- remote: large messages of UCX alone, between the same two processes; both end when the other side has the last one
- disk: sequential writes of one aligned buffer, O_DIRECT or through the page cache as the DiskMemory beside it; both
  end with fdatasync

One thread computes. ``gather`` and ``seal`` are the two steps before a flush, each by itself.
"""

from __future__ import annotations

import argparse
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
            buffer.work.view(part.dtype).view(part.shape).copy_(part)

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


def measure(media: Sequence[Medium], chunk_sizes: Sequence[int], sample_bytes: int, rounds: int) -> Table:
    """Every medium and size has been measured in every round, after one round that does not count."""
    table = Table()
    for size in chunk_sizes:
        chunks, staging = Chunks(size, sample_bytes), StagingRing(max(4, _STAGING_BYTES // size), size)
        for counted in [False] + [True] * rounds:
            seconds = {
                ("steps", "gather"): (chunks.num_bytes, gather_only(chunks, staging)),
                ("steps", "seal"): (chunks.num_bytes, seal_only(chunks, staging)),
            }
            for medium in media:
                seconds[medium.name, "raw"] = medium.raw()
                seconds[medium.name, "moved"] = (chunks.num_bytes, medium.moved(chunks, staging))
            if counted:
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
    parser.add_argument("--sample-mb", type=float, default=64, help="what one measurement moves, at most")
    parser.add_argument("--chunk-kb", type=int, nargs="+", default=_CHUNK_KB, help="multiples of 4")
    arguments = parser.parse_args()
    chunk_sizes = [size_kb << 10 for size_kb in arguments.chunk_kb]
    if any(size <= 0 or size % POSITION_BYTES for size in chunk_sizes):
        parser.error(f"--chunk-kb: {arguments.chunk_kb} are not all multiples of {POSITION_BYTES >> 10}")
    sample_bytes = int(arguments.sample_mb * (1 << 20))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        media: list[Medium] = [
            Local(sample_bytes, chunk_sizes),
            Remote(sample_bytes, chunk_sizes),
            Disk(Path(folder), sample_bytes),
        ]
        table = measure(media, chunk_sizes, sample_bytes, arguments.rounds)
        for medium in media:
            medium.close()
    print_tables(table, media, chunk_sizes)


if __name__ == "__main__":
    main()
