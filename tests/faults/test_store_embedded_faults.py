"""The embedded server when it or its starter dies (field report B23)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.store import EmbeddedEtcd, StoreClient, StoreSpec

from harness.store_server import is_running, nothing_left, until

__all__ = ["nothing_left"]

pytestmark = [pytest.mark.faults, pytest.mark.slow]

STARTER = """
import sys
from pathlib import Path
from dejavu.store import EmbeddedEtcd
etcd = EmbeddedEtcd(Path(sys.argv[1]))
print(etcd.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def etcd(tmp_path: Path, nothing_left: None) -> Iterator[EmbeddedEtcd]:
    etcd = EmbeddedEtcd(tmp_path / "data")
    yield etcd
    etcd.stop()


def test_embedded_killed_comes_back_on_the_same_port_with_its_data(etcd: EmbeddedEtcd) -> None:
    endpoint, first = etcd.endpoint, etcd.pid
    with contextlib.closing(StoreClient(StoreSpec(endpoints=(endpoint,), timeout_s=10.0))) as client:
        client.put("/k", b"1")
        os.kill(first, signal.SIGKILL)
        until(lambda: etcd.pid != first, "the restart")
        entry = client.get("/k")
    assert entry is not None
    assert entry.value == b"1"
    assert etcd.endpoint == endpoint
    assert etcd.restarts == 1


def test_embedded_stopped_while_frozen_is_gone(etcd: EmbeddedEtcd) -> None:
    os.kill(etcd.pid, signal.SIGSTOP)
    etcd.stop()
    assert not is_running(etcd.pid)


def test_embedded_starter_killed_leaves_no_etcd(tmp_path: Path, nothing_left: None) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "data")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    etcd_pid = int(starter.stdout.readline())
    assert is_running(etcd_pid)
    starter.kill()
    starter.communicate()
    until(lambda: not is_running(etcd_pid), "the end of etcd")


def test_embedded_ctrl_c_to_the_starters_group_does_not_reach_etcd(etcd: EmbeddedEtcd) -> None:
    assert os.getpgid(etcd.pid) != os.getpgid(0)
    assert os.getsid(etcd.pid) != os.getsid(0)
