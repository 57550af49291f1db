"""A wish for another declared state, followed in a store that is made up."""

from __future__ import annotations

import pytest

from dejavu.clock import VirtualClock
from dejavu.config import Config
from dejavu.config.declared import declared_state
from dejavu.control.member import encode_json
from dejavu.control.spec_change import SpecChange
from dejavu.errors import DejavuError
from dejavu.report.progress import SilentProgress
from dejavu.store.entry import Entry
from dejavu.store.keys import Keys
from dejavu.workflows.wish import Wishes

KEYS = Keys("c")


class Store:
    """A client; each look at the declared state finds the next one of these revisions, the last one for good.

    Nobody leads the cluster while its declared state is missing: both lie on one lease.
    """

    def __init__(self, *revisions: int | None) -> None:
        self._revisions = list(revisions)
        self.change: SpecChange | None = None

    def get(self, key: str) -> Entry | None:
        if key == KEYS.controller:
            is_led = self._revisions[0] is not None
            if not is_led and len(self._revisions) > 1:
                self._revisions.pop(0)
            return _entry(key, b"{}") if is_led else None
        if key == KEYS.changes(2) and self.change is not None:
            return _entry(key, encode_json(self.change))
        if key != KEYS.spec:
            return None
        revision = self._revisions.pop(0) if len(self._revisions) > 1 else self._revisions[0]
        if revision is None:
            return None
        state = declared_state(Config())
        state.revision = revision
        return _entry(key, encode_json(state))


def _entry(key: str, value: bytes) -> Entry:
    return Entry(key=key, value=value, mod_revision=1, create_revision=1)


def outcome(store: Store, timeout_s: float = 10.0) -> SpecChange:
    wishes = Wishes(store, KEYS)  # type: ignore[arg-type]
    return wishes.outcome(2, timeout_s, VirtualClock(), SilentProgress())


def test_a_wish_that_went_with_the_controllers_lease_is_told_to_be_lost() -> None:
    """It used to be waited for to the end, and then said to be declared still."""
    with pytest.raises(DejavuError, match="change 2 was lost with the controller's lease"):
        outcome(Store(2, None, None, 1))


def test_a_cluster_that_nobody_leads_for_longer_has_ended() -> None:
    with pytest.raises(DejavuError, match="the cluster c ended before change 2 was in force"):
        outcome(Store(2, None), timeout_s=20.0)


def test_a_declared_state_that_is_missing_for_a_moment_is_no_loss() -> None:
    with pytest.raises(DejavuError, match="it stays declared and may still come"):
        outcome(Store(2, None, 2))


def test_a_wish_that_was_answered_is_not_lost_whatever_is_declared_since() -> None:
    store = Store(3)
    store.change = SpecChange(revision=2, differences={}, asked_s=0.0, phase="done")
    assert outcome(store).phase == "done"
