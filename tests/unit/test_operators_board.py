"""The operator's board over a store that is made up."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from dejavu.clock import VirtualClock
from dejavu.control.member import encode_json
from dejavu.engine.cluster_view import ControllerEntry
from dejavu.errors import ConfigError, Fatal
from dejavu.ids import WorkerName
from dejavu.store.entry import Entry, Snapshot
from dejavu.store.faults import StoreUnavailable
from dejavu.store.keys import Keys
from operators.board import StoreBoard
from operators.loop import Board

from harness.made_up_launcher import FakeLauncher, member

W0 = WorkerName("w0")
ENTRY = ControllerEntry(incarnation="me", host="h", pid=1, address="127.0.0.1:1")


class LeaseNotFound(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.NOT_FOUND


class FakeStore:
    """A client and a lease keeper in one: a map."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_away = False
        self.has_lease = True
        self.on_refusal: Callable[[], None] = lambda: None
        self.lease_id = 7
        self.losses = 0
        self.lease_is_gone = False
        self.leases: dict[str, int] = {}

    def wait_held(self, timeout_s: float) -> bool:
        return self.has_lease

    def put_if(self, key: str, value: bytes, mod_revision: int, *, lease_id: int) -> bool:
        if self.lease_is_gone:
            raise LeaseNotFound
        if (key in self.values) != bool(mod_revision):
            self.on_refusal()
            return False
        self.values[key], self.leases[key] = value, lease_id
        return True

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def update(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> Entry | None:
        if self.is_away:
            raise StoreUnavailable("away")
        return _entry(key, self.values[key]) if key in self.values else None

    def get_prefix(self, prefix: str) -> Snapshot:
        if self.is_away:
            raise StoreUnavailable("away")
        return Snapshot(entries=tuple(_entry(key, value) for key, value in sorted(self.values.items())), revision=1)


def _entry(key: str, value: bytes) -> Entry:
    return Entry(key=key, value=value, mod_revision=1, create_revision=1)


def board(store: FakeStore) -> StoreBoard:
    return StoreBoard(store, store, Keys("c"))  # type: ignore[arg-type]


def test_the_board_fits_the_loop() -> None:
    fits: Board = board(FakeStore())
    assert fits


def test_a_claim_waits_for_the_lease_of_a_dead_controller_to_run_out() -> None:
    store = FakeStore()
    store.values[Keys("c").controller] = b"another"
    clock = VirtualClock()
    store.on_refusal = lambda: store.values.clear() if clock.now() > 3.0 else None
    board(store).claim(ENTRY, clock, lease_ttl_s=5.0)
    assert store.values[Keys("c").controller] == encode_json(ENTRY)


def test_a_claim_beside_a_living_controller_is_refused_naming_it() -> None:
    store = FakeStore()
    store.values[Keys("c").controller] = b'{"host":"elsewhere"}'
    with pytest.raises(ConfigError, match=r"(?s)cluster.name=c.*elsewhere"):
        board(store).claim(ENTRY, VirtualClock(), lease_ttl_s=5.0)


def test_a_claim_without_a_lease_is_fatal() -> None:
    store = FakeStore()
    store.has_lease = False
    with pytest.raises(Fatal, match="no lease"):
        board(store).claim(ENTRY, VirtualClock(), lease_ttl_s=5.0)


def test_the_board_sees_what_was_put() -> None:
    store = FakeStore()
    made = board(store)
    made.put_spec(None, b"spec")
    assert made.put_plan_if(None, b'{"epoch": 1}') is True
    made.put_journal(1, b"journal")
    store.values[Keys("c").worker(W0)] = encode_json(member(W0))
    seen = made.observe(FakeLauncher())
    assert (seen.spec, seen.plan) == (b"spec", b'{"epoch": 1}')
    assert seen.members == {W0: member(W0)}
    assert seen.journals == {1: b"journal"}
    # Nothing may outlive this controller.
    assert set(store.leases.values()) == {store.lease_id}
    made.drop_journal(1)
    assert made.observe(FakeLauncher()).journals == {}


def test_a_plan_is_put_only_over_the_one_that_was_seen() -> None:
    store = FakeStore()
    made = board(store)
    assert made.put_plan_if(b"one", b"two") is False
    assert made.put_plan_if(None, b"one") is True
    assert made.put_plan_if(None, b"two") is False
    assert made.put_plan_if(b"one", b"two") is True
    assert store.values[Keys("c").plan] == b"two"


def test_the_declared_state_is_not_put_over_a_wish_that_was_not_seen() -> None:
    """The keeper used to put it late and whatever was there: a wish was lost, and its user told that it would come."""
    store = FakeStore()
    made = board(store)
    made.put_spec(None, b"declared")
    store.values[Keys("c").spec] = b"a wish"
    made.put_spec(b"declared", b"refused")
    assert store.values[Keys("c").spec] == b"a wish"
    made.put_spec(b"a wish", b"taken up")
    assert (store.values[Keys("c").spec], store.leases[Keys("c").spec]) == (b"taken up", store.lease_id)


def test_workers_that_another_controller_has_left_behind_are_not_seen() -> None:
    """A controller that was started again within seconds used to take them for its own: their epoch is 1, too."""
    store, keys = FakeStore(), Keys("c")
    made = board(store)
    made.claim(ENTRY, VirtualClock(), lease_ttl_s=5.0)
    mine, newcomer = member(W0, leader="me"), member(WorkerName("w1"), "starting")
    for one in (mine, newcomer, member(WorkerName("w2"), leader="the one before")):
        store.values[keys.worker(one.name)] = encode_json(one)
    assert made.observe(FakeLauncher()).members == {mine.name: mine, newcomer.name: newcomer}


def test_a_put_whose_outcome_is_not_known_says_so() -> None:
    store = FakeStore()
    made = board(store)
    store.lease_is_gone = True
    assert made.put_plan_if(None, b"one") is None
    made.put_journal(1, b"journal")
    store.is_away = True
    assert made.put_plan_if(None, b"one") is None
    made.put_journal(1, b"journal")
    made.drop_journal(1)
    assert store.values == {}


def test_the_board_tells_a_store_that_has_lost_this_controllers_own_key() -> None:
    store = FakeStore()
    made = board(store)
    made.claim(ENTRY, VirtualClock(), lease_ttl_s=5.0)
    assert made.observe(FakeLauncher()).own_key_present
    store.values.clear()
    store.losses = 1
    seen = made.observe(FakeLauncher())
    assert (seen.own_key_present, seen.losses) == (False, 1)


def test_the_board_knows_nothing_of_members_while_the_store_is_away_and_of_processes_it_does() -> None:
    store, launcher = FakeStore(), FakeLauncher()
    made = board(store)
    launcher.start(W0)
    store.is_away = True
    seen = made.observe(launcher)
    assert (seen.members, seen.running) == (None, frozenset({W0}))
    store.is_away = False
    assert made.observe(launcher).members == {}
