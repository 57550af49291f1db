"""A worker as it registers itself in the store: the JSON value of ``/dejavu/<cluster>/workers/<name>``."""

from __future__ import annotations

from typing import Literal

import msgspec

from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.kv.layout import LayerRange

MemberState = Literal["starting", "ready", "serving", "draining"]


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live worker. ``starting``: alive, perhaps still loading; ``ready``: its stage is built, or it
    waits on standby; ``serving``: linked."""

    name: WorkerName
    incarnation: IncarnationId
    host: str
    pid: int
    address: str
    """``host:port`` of its listener."""
    device: str
    memory_bytes: int
    """Of the machine, total."""
    state: MemberState
    pipeline: str | None = None
    stage: int | None = None
    layers: LayerRange | None = None
    epoch: Epoch | None = None
    """Of the plan in which it has this place."""
    leader: str | None = None
    """Incarnation of the controller that it serves; None: it has seen none yet."""
    problem: str | None = None
    """Why the worker cannot go on, said before it exits."""


def encode_json(value: object) -> bytes:
    """JSON that a person can read with etcdctl: one line, no blanks."""
    return msgspec.json.encode(value)


def decode_member(data: bytes) -> Member:
    """The member of a key's value. Raises msgspec.DecodeError for anything else."""
    return msgspec.json.decode(data, type=Member)
