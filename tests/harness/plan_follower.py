"""A worker that computes nothing: ``python plan_follower.py``. It registers and follows the plan as the real one does.

Its spec is a real one. Epochs come and go in milliseconds, so tests of the operator need not wait for models.
"""

from __future__ import annotations

import os
import sys
import time
import uuid

import msgspec

from dejavu.control.member import Member, MemberState, encode_json
from dejavu.control.plan import Place, Plan
from dejavu.engine.worker_spec import decode_worker_spec
from dejavu.errors import Retryable
from dejavu.ids import Epoch, IncarnationId
from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper

LOOK_S = 0.02


class Follower:
    """One incarnation."""

    def __init__(self, line: bytes) -> None:
        self._spec = decode_worker_spec(line)
        self._keys = Keys(self._spec.cluster)
        self._incarnation = IncarnationId(uuid.uuid4().hex[:12])
        self._client = StoreClient(self._spec.store)
        entries = {self._keys.worker(self._spec.name): encode_json(self._member("starting", None, None))}
        self._keeper = LeaseKeeper(self._spec.store, self._spec.lease_ttl_s, entries)
        self._keeper.wait_held(self._spec.start_timeout_s)

    def run(self) -> None:
        """Follows the plan until this incarnation is fenced."""
        epoch = Epoch(0)
        while True:
            time.sleep(LOOK_S)
            plan = self._plan()
            if plan is None or plan.epoch <= epoch:
                continue
            if any(fenced.incarnation == self._incarnation for fenced in plan.fenced):
                return
            epoch = plan.epoch
            place = plan.place_of(self._spec.name)
            state: MemberState = "ready" if place is None else "serving"
            member = self._member(state, place, None if place is None else epoch)
            self._keeper.update(self._keys.worker(self._spec.name), encode_json(member))

    def _plan(self) -> Plan | None:
        try:
            entry = self._client.get(self._keys.plan)
        except Retryable:
            return None
        return None if entry is None else msgspec.json.decode(entry.value, type=Plan)

    def _member(self, state: MemberState, place: Place | None, epoch: Epoch | None) -> Member:
        return Member(
            name=self._spec.name,
            incarnation=self._incarnation,
            host="here",
            pid=os.getpid(),
            address=f"127.0.0.1:{os.getpid()}",
            device="cpu",
            memory_bytes=1,
            state=state,
            pipeline=None if place is None else place.pipeline.kind,
            epoch=epoch,
        )


if __name__ == "__main__":
    Follower(sys.stdin.buffer.readline()).run()
