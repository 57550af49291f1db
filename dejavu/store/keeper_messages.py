"""What a lease's owner and its sidecar say to each other: one JSON object a line, through two pipes."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dejavu.store.spec import StoreSpec


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first line to the sidecar. It may carry a password, so it goes through the pipe and nowhere else."""

    spec: StoreSpec
    ttl_s: float
    entries: dict[str, bytes]
    owner_pid: int
    guard: bytes = b""
    """In every value of this owner: a key that has come back without it belongs to somebody else."""
    resumes: bool
    """True when an earlier sidecar of this owner held a lease: keys that are found missing are then a loss."""


class Update(msgspec.Struct, frozen=True, kw_only=True, tag="update"):
    """The keys have these values from now on; later lines win."""

    entries: dict[str, bytes]


class Cut(msgspec.Struct, frozen=True, kw_only=True, tag="cut"):
    """From now on etcd is not to be touched, or is again. For injected partitions."""

    is_cut: bool


class Held(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """The sidecar's word that the lease is held and all keys are in etcd."""

    lease_id: int


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """The sidecar's word that the lease had run out or was gone; others may have taken the owner for dead."""


class Replaced(msgspec.Struct, frozen=True, kw_only=True, tag="replaced"):
    """The sidecar's word that, after a loss, these keys were found to be another's; they are left alone."""

    keys: tuple[str, ...]


class Trouble(msgspec.Struct, frozen=True, kw_only=True, tag="trouble"):
    """The sidecar's word that etcd cannot be used at the moment, and why; it goes on trying."""

    reason: str


ToSidecar: TypeAlias = Start | Update | Cut
ToOwner: TypeAlias = Held | Lost | Replaced | Trouble


def line_of(message: ToSidecar | ToOwner) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message) + b"\n"


def to_sidecar(line: bytes) -> ToSidecar:
    """The message in a line from the owner. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=ToSidecar)


def to_owner(line: bytes) -> ToOwner:
    """The message in a line from the sidecar. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=ToOwner)
