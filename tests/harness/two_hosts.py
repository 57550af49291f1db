"""Two hosts on one machine: network namespaces with a link between them. Needs root; nothing of them is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dejavu.control.member import Member
from dejavu.store.embedded import etcd_binary
from dejavu.store.keys import Keys
from dejavu.store.spec import StoreSpec

SECRET = "two-hosts-know-this-secret"
HERE, THERE = "10.213.77.1", "10.213.77.2"
STORE = f"{HERE}:2379"
CLUSTER = "two-hosts"


@dataclass(slots=True)
class Host:
    """One of the two: its name space, its end of the link, and the processes that were started on it."""

    namespace: str
    interface: str
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, *words: str) -> str:
        """What the command prints there."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *words], check=True, capture_output=True, text=True
        ).stdout

    def start(self, name: str, words: Sequence[str]) -> None:
        """The command runs there, its output in ``name.log``."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "DEJAVU_CLUSTER_SECRET": SECRET},
            )

    def start_worker(self, name: str) -> None:
        """A worker joins from there, by hand; it listens on the link's interface."""
        words = [f"store.endpoints=[{STORE}]", f"cluster.name={CLUSTER}", f"name={name}", f"host={self.interface}"]
        self.start(name, [sys.executable, "-m", "dejavu.worker", *words])

    def log_of(self, name: str) -> str:
        """What the process has printed."""
        return (self.folder / f"{name}.log").read_text()

    def set_link(self, state: str) -> None:
        """The host's end of the link is ``up`` or ``down``."""
        self.run("ip", "link", "set", self.interface, state)

    def shape(self, rate: str) -> None:
        """What leaves over the link is at most so fast, such as ``2mbit``, but for the first 16 KiB of a burst."""
        self.run(
            "tc", "qdisc", "add", "dev", self.interface, "root", "tbf", "rate", rate, "burst", "16k", "latency", "1s"
        )

    def num_held_back(self) -> int:
        """How often something had to wait for the shaped link; 0 for one that is not shaped."""
        told = self.run("tc", "-s", "qdisc", "show", "dev", self.interface)
        return sum(int(count) for count in re.findall(r"overlimits (\d+)", told))

    def kill_all(self) -> None:
        """Everything on the host ends at once, as when it loses power."""
        for pid in self.run("ip", "netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def end(self) -> None:
        """Nothing runs there any more."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        self.kill_all()
        for process in self.processes.values():
            process.wait()


@dataclass(slots=True)
class TwoHosts:
    """The controller and the store are ``here``; both hosts have workers."""

    here: Host
    there: Host

    def etcdctl(self, *words: str) -> str:
        """What etcd's own tool prints."""
        return self.here.run(str(etcd_binary().with_name("etcdctl")), f"--endpoints={STORE}", *words)

    def members(self) -> dict[str, Member]:
        """The registered workers."""
        import msgspec

        keys = Keys(CLUSTER)
        lines = self.etcdctl("get", "--prefix", keys.workers_prefix, "--print-value-only").splitlines()
        members = [msgspec.json.decode(line, type=Member) for line in lines if line]
        return {member.name: member for member in members}

    @property
    def store(self) -> StoreSpec:
        """As both hosts reach it."""
        return StoreSpec(endpoints=(STORE,))


def why_not() -> str | None:
    """Why this machine cannot play two hosts."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    probe = f"dejavu-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts with a link, and an etcd on the first; skips the test where that cannot be."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    mark = os.getpid() % 100000
    hosts = [Host(f"dejavu-{side}-{mark}", f"dj{side}{mark}", folder / side) for side in ("a", "b")]
    here, there = hosts
    with contextlib.ExitStack() as stack:
        for host in hosts:
            host.folder.mkdir()
            _ip("netns", "add", host.namespace)
            # The link goes with its namespaces.
            stack.callback(_ip, "netns", "del", host.namespace)
            stack.callback(host.end)
        _ip(
            "link",
            "add",
            here.interface,
            "netns",
            here.namespace,
            "type",
            "veth",
            "peer",
            there.interface,
            "netns",
            there.namespace,
        )
        for host, address in ((here, HERE), (there, THERE)):
            host.run("ip", "addr", "add", f"{address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                host.run("ip", "link", "set", interface, "up")
        here.start("etcd", _etcd_words(folder))
        yield TwoHosts(here, there)


def _etcd_words(folder: Path) -> list[str]:
    url, peers = f"http://{STORE}", f"http://{HERE}:2380"
    return [
        str(etcd_binary()),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--unsafe-no-fsync",
    ]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
