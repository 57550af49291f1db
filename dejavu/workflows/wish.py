"""A wish for another declared state: put into the store of a cluster that runs, and followed to its outcome."""

from __future__ import annotations

from copy import deepcopy

import msgspec

from dejavu.clock import Clock
from dejavu.config import Config
from dejavu.config.declared import FIRST_REVISION, DeclaredState, put_at, read_declared, value_at
from dejavu.control.member import encode_json
from dejavu.control.spec_change import SpecChange, differences
from dejavu.errors import ConfigError, DejavuError
from dejavu.report.cluster_status import ConditionStatus
from dejavu.report.progress import Progress
from dejavu.store.client import StoreClient
from dejavu.store.faults import StoreUnavailable
from dejavu.store.keys import Keys
from dejavu.workflows.external_store import unknown_cluster
from operators.placement import revision_of

_LOOK_S = 0.1
_ABSENT_S = 10.0
"""Nobody leads a cluster for a moment where its controller's lease was lost: it puts its keys again."""


class Wishes:
    """Of one cluster, whose store ``client`` reaches."""

    def __init__(self, client: StoreClient, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def put(self, config: Config, deadline_s: float, clock: Clock) -> SpecChange | None:
        """The wish is in the store, on top of what is declared there; None when that is the same.

        Waits while an earlier wish is being answered. Raises ConfigError for a cluster that is not there or values that
        make no sense in it, DejavuError at the deadline.
        """
        while True:
            entry = self._client.get(self._keys.spec)
            if entry is None or self._client.get(self._keys.controller) is None:
                raise self._absent()
            state = read_declared(entry.value)
            if self._is_answered(state.revision):
                wished = _with_keys(state, config)
                after = encode_json(wished)
                read_declared(after)
                found = differences(msgspec.json.decode(entry.value), msgspec.json.decode(after))
                del found["revision"]
                if not found:
                    return None
                if self._client.put_if(self._keys.spec, after, entry.mod_revision, keeps_lease=True):
                    return SpecChange(revision=wished.revision, differences=found, asked_s=clock.now())
            if clock.monotonic() >= deadline_s:
                raise DejavuError(f"an earlier change, revision {state.revision}, was not answered in time")
            clock.sleep(_LOOK_S)

    def outcome(self, revision: int, deadline_s: float, clock: Clock, progress: Progress) -> SpecChange:
        """What became of the wish, in the end. Raises DejavuError at the deadline, or when the cluster ends."""
        told, led_s = "", clock.monotonic()
        while True:
            try:
                change, reason = self._change(revision), self._condition()
                if change is not None and change.is_over:
                    return change
                is_led = self._client.get(self._keys.controller) is not None
                led_s = clock.monotonic() if is_led else led_s
                if clock.monotonic() - led_s > _ABSENT_S:
                    raise DejavuError(f"the cluster {self._keys.cluster} ended before change {revision} was in force")
                if is_led and change is None and self._is_lost(revision):
                    raise DejavuError(f"change {revision} was lost with the controller's lease: ask for it again")
                news = reason if change is None else f"change {revision}: {change.phase}, epoch {change.epoch}"
            except StoreUnavailable as error:
                news = f"the store does not answer: {error}"
            if news != told:
                told = news
                progress.note(news)
            if clock.monotonic() >= deadline_s:
                raise DejavuError(
                    f"change {revision} was not in force within apply.timeout_s; it stays declared and may still come\n"
                    f"last: {told}"
                )
            clock.sleep(_LOOK_S)

    def _is_answered(self, revision: int) -> bool:
        if revision == FIRST_REVISION:
            return True
        change = self._change(revision)
        return change is not None and change.is_over

    def _is_lost(self, revision: int) -> bool:
        """The declared state is an older one again: nobody will take up this one."""
        entry = self._client.get(self._keys.spec)
        return entry is not None and revision_of(entry.value) < revision

    def _change(self, revision: int) -> SpecChange | None:
        entry = self._client.get(self._keys.changes(revision))
        return None if entry is None else msgspec.json.decode(entry.value, type=SpecChange)

    def _condition(self) -> str:
        """What the cluster says of itself."""
        entry = self._client.get(self._keys.status)
        if entry is None:
            return "waiting for the cluster"
        ready = msgspec.json.decode(entry.value, type=dict[str, ConditionStatus]).get("Ready")
        return "waiting for the cluster" if ready is None else f"waiting for the cluster: {ready.reason}"

    def _absent(self) -> DejavuError:
        if self._client.get_prefix(self._keys.prefix).entries:
            return ConfigError(
                f"cluster.name={self._keys.cluster}: nobody leads this cluster; it is starting or has ended"
            )
        return unknown_cluster(self._client, self._keys)


def _with_keys(state: DeclaredState, config: Config) -> DeclaredState:
    """The next revision of the state, with the given keys of the declaration and no others."""
    wished = deepcopy(state)
    for key in config.apply.wanted:
        put_at(wished, key, value_at(config, key))
    wished.revision += 1
    return wished
