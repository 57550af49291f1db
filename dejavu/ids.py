"""Identities and counters that travel between modules; a NewType each, so that they cannot be mixed up."""

from __future__ import annotations

from typing import NewType

WorkerName = NewType("WorkerName", str)
"""A worker's name: stable over restarts, unique in its cluster, e.g. ``w0``."""

IncarnationId = NewType("IncarnationId", str)
"""New at every start of a worker; tells a restarted worker from the one it replaces."""

RequestId = NewType("RequestId", str)
"""The user's name for a request."""

RowId = NewType("RowId", int)
"""One request's KV, one attempt: a new number at every attempt, so a late chunk of an old attempt is never taken."""

Epoch = NewType("Epoch", int)
"""The generation of the plan; it grows with every repair or re-plan, and messages of an older one are refused."""

FIRST_EPOCH = Epoch(1)
"""In which a cluster starts."""
