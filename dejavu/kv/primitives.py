"""DéjàVuLib's six primitives on three levels (DejaVu, table 1), in one place to import from.

| level | out          | in          | does                                                                           |
|-------|--------------|-------------|--------------------------------------------------------------------------------|
| 3     | `stream_out` | `stream_in` | from the inference setup, find destinations or sources; split or merge         |
| 2     | `scatter`    | `gather`    | a non-contiguous region to contiguous, sealed chunks in staging, and back      |
| 1     | `flush`      | `fetch`     | one contiguous chunk to a destination (local memory, a peer, disk), and back  |

Each level uses the one below and can be used alone. Between `flush` and `fetch` lies a message: a `KvMessage` header
and the chunks' bytes. A receiver that needs no proof of whole rows can `fetch` or `gather` chunk by chunk; one that
does gives messages to a `KvInbox` (inbox.py), which yields the `LandedRow` that `stream_in` takes. `DiskMemory` is a
destination that keeps messages; `read_row` gives the row's chunks, and again a `LandedRow`. `Streamer` (streamer.py)
runs them beside the computation; a `ReplicaStore` (replica.py) is the receiver of rows that grow.
"""

from __future__ import annotations

from dejavu.kv.disk import DiskLimits, DiskMemory
from dejavu.kv.disk_row import DiskRow, read_row
from dejavu.kv.flush import Destination, Destinations, LocalMemory, RemoteMemory, Sender, fetch, flush
from dejavu.kv.scatter import Region, Staged, gather, pool_region, scatter
from dejavu.kv.stream import LandedRow, Streamed, flush_staged, stream_in, stream_out, stream_out_rows
from dejavu.kv.stream_setup import PoolRow, StreamSetup

__all__ = [
    "Destination",
    "Destinations",
    "DiskLimits",
    "DiskMemory",
    "DiskRow",
    "LandedRow",
    "LocalMemory",
    "PoolRow",
    "Region",
    "RemoteMemory",
    "Sender",
    "Staged",
    "StreamSetup",
    "Streamed",
    "fetch",
    "flush",
    "flush_staged",
    "gather",
    "pool_region",
    "read_row",
    "scatter",
    "stream_in",
    "stream_out",
    "stream_out_rows",
]
