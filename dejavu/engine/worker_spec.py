"""What a worker process is told at its start: how to reach the store and who it is. Its role comes from the plan."""

from __future__ import annotations

import msgspec

from dejavu.ids import WorkerName
from dejavu.store.spec import StoreSpec


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line through a pipe: it carries the cluster's secret, so it is never an argument or a variable."""

    name: WorkerName
    cluster: str
    secret: str
    store: StoreSpec
    host: str
    """Address that the worker publishes for its listener."""
    lease_ttl_s: float
    device: str
    transport_kind: str
    transport_settings: dict[str, str]
    start_timeout_s: float
    kv_folder: str | None = None
    """Of this worker alone, for copies of KV on disk; made when needed."""
    log_level: str = "INFO"

    def __repr__(self) -> str:
        return f"WorkerSpec(name={self.name!r}, cluster={self.cluster!r})"


def decode_worker_spec(line: bytes) -> WorkerSpec:
    """The spec of a JSON line. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=WorkerSpec)
