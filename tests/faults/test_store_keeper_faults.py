"""A lease must outlast everything but its owner's death or freeze (field reports B16 and B17)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dejavu.store import LeaseKeeper, PrefixWatch, StoreClient, StoreSpec

from harness.store_server import Recorder, StoreServer, client, is_running, nothing_left, server, until

__all__ = ["client", "nothing_left", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.slow]

KEY = "/leased/w0"

# Registers, says so, and then obeys one line at a time.
OWNER = """
import ctypes, os, sys
import msgspec
from dejavu.store import LeaseKeeper, StoreSpec
spec = msgspec.json.decode(sys.stdin.readline(), type=StoreSpec)
keeper = LeaseKeeper(spec, float(sys.argv[1]), {sys.argv[2]: b"alive"})
assert keeper.wait_held(30)
print("held", flush=True)
for line in sys.stdin:
    if line.startswith("fork") and os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    if line.startswith("hold-gil"):
        # PyDLL keeps the GIL during the call.
        ctypes.PyDLL(None).sleep(int(line.split()[1]))
    print("losses", keeper.losses, flush=True)
keeper.close()
"""


class Owner:
    """A process that holds KEY on a lease."""

    def __init__(self, spec: StoreSpec, ttl_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(ttl_s), KEY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.send(msgspec.json.encode(spec).decode())
        assert self.read() == "held"

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def owning(server: StoreServer, ttl_s: float) -> Iterator[Owner]:
    owner = Owner(server.spec, ttl_s)
    try:
        yield owner
    finally:
        owner.end()


@pytest.fixture
def recorder(server: StoreServer) -> Iterator[Recorder]:
    """What somebody who watches the leased keys sees."""
    recorder = Recorder()
    watch = PrefixWatch(server.spec, "/leased/", recorder)
    recorder.wait_for(lambda r: bool(r.changes), "the first listing")
    yield recorder
    watch.stop()


@pytest.fixture
def keeper(server: StoreServer, recorder: Recorder) -> Iterator[LeaseKeeper]:
    """A keeper of this process's own, TTL 1 s, seen by the recorder."""
    keeper = LeaseKeeper(server.spec, 1.0, {KEY: b"alive", KEY + "/more": b"1"})
    assert keeper.wait_held(30.0)
    recorder.wait_for(lambda r: len(r.state) == 2, "both keys")
    yield keeper
    keeper.close()


def sidecar_of(owner_pid: int) -> int:
    """The process id of the owner's lease keeper."""
    for children in Path(f"/proc/{owner_pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            if "dejavu.store.keeper" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
    raise AssertionError("no sidecar is running")


def test_keeper_owner_killed_keys_go_long_before_the_ttl(server: StoreServer, recorder: Recorder) -> None:
    # With a TTL beyond the test's patience only a revoke can explain the deletion.
    with owning(server, 300.0) as owner:
        owner.process.kill()
        recorder.wait_for(lambda r: r.deletes == [KEY], "the deletion")


def test_keeper_owner_killed_that_has_forked_keys_go_long_before_the_ttl(
    server: StoreServer, recorder: Recorder
) -> None:
    # The owner's child holds the pipe's end as well, so there is no end of file.
    with owning(server, 300.0) as owner:
        owner.send("fork")
        assert owner.read() == "losses 0"
        owner.process.kill()
        recorder.wait_for(lambda r: r.deletes == [KEY], "the deletion")


def test_keeper_owner_stopped_lease_runs_out_and_comes_back_as_a_loss(server: StoreServer, recorder: Recorder) -> None:
    with owning(server, 1.0) as owner:
        owner.process.send_signal(signal.SIGSTOP)
        recorder.wait_for(lambda r: r.deletes == [KEY], "the expiry")
        owner.process.send_signal(signal.SIGCONT)
        recorder.wait_for(lambda r: r.state == {KEY: b"alive"}, "the return")
        # The key is seen before the sidecar's word of it, so ask until both have met.
        answers = iter(lambda: (owner.send("?"), owner.read())[1], "losses 1")
        until(lambda: next(answers, None) is None, "the owner's count")


def test_keeper_owner_holds_the_gil_for_twice_the_ttl_nothing_changes(server: StoreServer, recorder: Recorder) -> None:
    with owning(server, 2.0) as owner:
        owner.send("hold-gil 4")
        assert owner.read() == "losses 0"
        assert recorder.deletes == []
        assert recorder.puts_of(KEY) == [b"alive"]


def test_keeper_owner_stopped_for_less_than_the_ttl_nothing_changes(server: StoreServer, recorder: Recorder) -> None:
    with owning(server, 3.0) as owner:
        owner.process.send_signal(signal.SIGSTOP)
        # The length of the fault, not a wait for anything.
        threading.Event().wait(1.2)
        owner.process.send_signal(signal.SIGCONT)
        owner.send("hold-gil 3")
        assert owner.read() == "losses 0"
        assert recorder.deletes == []


def test_keeper_etcd_wiped_all_keys_come_back_at_one_revision_and_the_loss_is_counted(
    server: StoreServer, recorder: Recorder, keeper: LeaseKeeper
) -> None:
    keeper.update(KEY, b"newer")
    recorder.wait_for(lambda r: r.state[KEY] == b"newer", "the update")
    seen = len(recorder.changes)
    server.wipe()
    server.start()
    recorder.wait_for(lambda r: len(r.changes) > seen and r.state.get(KEY) == b"newer", "the registration anew")
    assert len({entry.mod_revision for change in recorder.changes[seen:] for entry in change.puts}) == 1
    until(lambda: keeper.losses == 1, "the counted loss")


def test_keeper_etcd_killed_and_restarted_at_once_nothing_is_lost(
    server: StoreServer, recorder: Recorder, keeper: LeaseKeeper
) -> None:
    server.kill()
    server.start()
    keeper.update(KEY, b"after")
    recorder.wait_for(lambda r: r.state[KEY] == b"after", "an update after the restart")
    assert recorder.deletes == []
    assert keeper.losses == 0


def test_keeper_etcd_frozen_beyond_the_ttl_keys_are_there_again_afterwards(
    server: StoreServer, recorder: Recorder, keeper: LeaseKeeper
) -> None:
    with server.frozen():
        # The length of the fault, not a wait for anything.
        threading.Event().wait(2.5)
        keeper.update(KEY, b"during")
    recorder.wait_for(lambda r: r.state.get(KEY) == b"during" and len(r.state) == 2, "the update made in the freeze")


def test_keeper_updates_are_coalesced_and_the_last_one_wins(
    server: StoreServer, recorder: Recorder, keeper: LeaseKeeper
) -> None:
    with server.frozen():
        for number in range(20_000):
            keeper.update(KEY, b"%d" % number)
    recorder.wait_for(lambda r: r.state.get(KEY) == b"19999", "the last update")
    assert len(recorder.puts_of(KEY)) < 1000


def test_keeper_sidecar_killed_another_takes_over_unseen(server: StoreServer, recorder: Recorder) -> None:
    keeper = LeaseKeeper(server.spec, 10.0, {KEY: b"alive"})
    try:
        assert keeper.wait_held(30.0)
        first = sidecar_of(os.getpid())
        os.kill(first, signal.SIGKILL)
        recorder.wait_for(lambda r: len(r.puts_of(KEY)) == 2, "the second sidecar's put")
        assert recorder.deletes == []
        assert keeper.losses == 0
        assert not is_running(first)
    finally:
        keeper.close()
    recorder.wait_for(lambda r: r.deletes == [KEY], "the end")


def test_keeper_sidecar_gets_ctrl_c_and_stays(server: StoreServer, recorder: Recorder, keeper: LeaseKeeper) -> None:
    sidecar = sidecar_of(os.getpid())
    os.kill(sidecar, signal.SIGINT)
    keeper.update(KEY, b"still here")
    recorder.wait_for(lambda r: r.state[KEY] == b"still here", "an update by the same sidecar")
    assert is_running(sidecar)


def test_keeper_sidecar_imports_no_torch_and_shows_no_password(server: StoreServer, client: StoreClient) -> None:
    # This server knows no users, so the keeper is refused; it goes on trying all the same.
    spec = StoreSpec(endpoints=(server.endpoint,), user="root", password="hunter2-hunter2")
    keeper = LeaseKeeper(spec, 1.0, {KEY: b"alive"})
    try:
        until(lambda: bool(sidecar_pids()), "the sidecar")
        folder = Path(f"/proc/{sidecar_pids()[0]}")
        assert not keeper.wait_held(1.0)
        assert is_running(int(folder.name))
        assert "hunter2" not in (folder / "cmdline").read_text() + (folder / "environ").read_text()
        assert "torch" not in (folder / "maps").read_text()
    finally:
        keeper.close()


def sidecar_pids() -> list[int]:
    with contextlib.suppress(AssertionError):
        return [sidecar_of(os.getpid())]
    return []


def test_keeper_key_put_under_its_lease_by_compare_and_swap_goes_with_it(
    server: StoreServer, recorder: Recorder, client: StoreClient
) -> None:
    keeper = LeaseKeeper(server.spec, 300.0, {})
    try:
        assert keeper.wait_held(30.0)
        assert client.put_if("/leased/controller", b"me", 0, lease_id=keeper.lease_id)
        assert not client.put_if("/leased/controller", b"other", 0, lease_id=keeper.lease_id)
    finally:
        keeper.close()
    recorder.wait_for(lambda r: r.deletes == ["/leased/controller"], "the deletion")


def test_keeper_closed_while_etcd_is_frozen_returns_and_leaves_no_process(server: StoreServer) -> None:
    # The fixture finds the sidecar if it stays.
    keeper = LeaseKeeper(server.spec, 2.0, {KEY: b"alive"})
    assert keeper.wait_held(30.0)
    with server.frozen():
        keeper.close()
    keeper.close()


def test_keeper_closed_before_it_held_anything_leaves_no_process(server: StoreServer) -> None:
    LeaseKeeper(server.spec, 2.0, {KEY: b"alive"}).close()
