"""What a worker knows of its cluster from the store: the plan and the other workers. Kept fresh by a watch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from dejavu.control.member import Member, decode_member
from dejavu.control.plan import Plan
from dejavu.errors import Fatal
from dejavu.store.keys import Keys
from dejavu.store.spec import StoreSpec
from dejavu.store.watch import Change, PrefixWatch

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TICK_S = 0.5


class ControllerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON value of ``/dejavu/<cluster>/controller``."""

    incarnation: str
    host: str
    pid: int
    address: str


class ClusterView:
    """The cluster's keys as a watch delivers them; wait for what is needed, with a deadline.

    ``on_plan`` is called on the watch's thread when the plan may have changed.
    """

    def __init__(self, store: StoreSpec, keys: Keys, on_plan: Callable[[], None]) -> None:
        self._keys = keys
        self._on_plan = on_plan
        self._is_blind = False
        self._missed: list[Change] = []
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._watch = PrefixWatch(store, keys.prefix, self._take)

    def plan(self) -> Plan | None:
        """The plan in force, or None while there is none. Raises Fatal for one that this version cannot read."""
        value = self._value(self._keys.plan)
        try:
            return None if value is None else msgspec.json.decode(value, type=Plan)
        except (msgspec.DecodeError, ValueError) as error:
            raise Fatal(f"{self._keys.plan} cannot be read: {error}") from error

    def is_superseded(self, plan: Plan) -> bool:
        """True when a newer plan is in force."""
        newest = self.plan()
        return newest is not None and newest.epoch > plan.epoch

    def member(self, name: str) -> Member | None:
        """The registered worker, or None."""
        value = self._value(self._keys.worker(name))
        return None if value is None else decode_member(value)

    def controller(self) -> ControllerEntry | None:
        """Who leads, or None."""
        value = self._value(self._keys.controller)
        return None if value is None else msgspec.json.decode(value, type=ControllerEntry)

    def wait_for(self, look: Callable[[], T | None], what: str, timeout_s: float) -> T:
        """What ``look`` gives as soon as it is not None. Raises Fatal naming ``what`` at the deadline."""
        left_s = timeout_s
        while True:
            found = look()
            if found is not None:
                return found
            if left_s <= 0:
                raise Fatal(f"{what} did not appear in the store within {timeout_s:g} s")
            with self._changed:
                self._changed.wait(_TICK_S)
            left_s -= _TICK_S

    def be_blind(self, is_blind: bool) -> None:
        """While blind, nothing new is seen; afterwards, what was missed. For injected partitions."""
        with self._changed:
            self._is_blind = is_blind
            missed, self._missed = ([], self._missed) if is_blind else (self._missed, [])
        for change in missed:
            self._take(change)

    def close(self) -> None:
        """The watch has ended."""
        self._watch.stop()

    def _value(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def _take(self, change: Change) -> None:
        with self._changed:
            if self._is_blind:
                self._missed.append(change)
                return
            before = self._values.get(self._keys.plan)
            for key in change.deletes:
                self._values.pop(key, None)
            self._values.update({entry.key: entry.value for entry in change.puts})
            is_new_plan = self._values.get(self._keys.plan) != before
            self._changed.notify_all()
        if is_new_plan:
            self._on_plan()
