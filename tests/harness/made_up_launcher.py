"""A launcher whose processes are made up, and members to go with it."""

from __future__ import annotations

from pathlib import Path

from dejavu.control.member import Member, MemberState
from dejavu.ids import Epoch, IncarnationId, WorkerName
from operators.observation import ProcessExit


def member(
    name: WorkerName,
    state: MemberState = "serving",
    *,
    epoch: int = 1,
    incarnation: str = "i",
    leader: str | None = None,
) -> Member:
    """A worker as it would register itself."""
    return Member(
        name=name,
        incarnation=IncarnationId(incarnation),
        host="h",
        pid=1,
        address=f"127.0.0.1:{epoch}",
        device="cpu",
        memory_bytes=1,
        state=state,
        epoch=Epoch(epoch),
        leader=leader,
    )


class FakeLauncher:
    """Notes what it is told. The number of a start is the pid of its process."""

    def __init__(self) -> None:
        self.started: list[WorkerName] = []
        self.killed: list[WorkerName] = []
        self.ended: list[ProcessExit] = []
        self.is_ending = False

    def start(self, name: WorkerName) -> None:
        self.started.append(name)

    def kill(self, name: WorkerName) -> None:
        self.killed.append(name)

    def signal(self, name: WorkerName, signum: int) -> None:
        pass

    def tell(self, name: WorkerName, line: bytes) -> None:
        pass

    def pid_of(self, name: WorkerName) -> int | None:
        return self.pids().get(name)

    def pids(self) -> dict[WorkerName, int]:
        return {name: number for number, name in enumerate(self.started, 1)}

    def running(self) -> frozenset[WorkerName]:
        ended = {gone.pid for gone in self.ended}
        return frozenset(name for name, pid in self.pids().items() if pid not in ended)

    def exits(self) -> tuple[ProcessExit, ...]:
        return tuple(self.ended)

    def is_stopping(self) -> bool:
        return self.is_ending

    def log_of(self, name: WorkerName) -> Path:
        return Path(name)

    def stop(self) -> None:
        pass

    def end(self, name: WorkerName) -> None:
        """The worker's newest process was killed by somebody."""
        self.ended.append(ProcessExit(name=name, status=-9, pid=self.pids()[name], at_s=0.0))
