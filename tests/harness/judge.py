"""What must be true of every workload that suffered faults, and watchers that bring faults about at odd moments."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import msgspec

from dejavu.ids import RequestId, WorkerName
from dejavu.serving.overseer import Unwatched
from dejavu.store import Change, Keys, PrefixWatch, StoreSpec
from operators.status import Condition

from harness.cluster_kit import Kit, Served, tokens_of

MOST_STEPS_AGAIN = 4
"""A copy lags by what its holder has not acknowledged: a step or two, and never many where rows are short."""

Conditions = Mapping[str, Condition]
Tokens = Mapping[RequestId, tuple[int, ...]]


def assert_right(served: Served, expected: Tokens) -> None:
    """Every request ended once with the expected tokens, every repair is told to its end, and the counts agree."""
    assert tokens_of(served.completions) == expected
    assert {completion.finish_reason for completion in served.completions.values()} <= {"stop", "length"}
    for journal in served.journals:
        assert journal.phase == "done", journal
        assert journal.receipt is not None
        assert journal.fenced_s is not None
        assert journal.replaced_s is not None
        times = (journal.fenced_s, journal.replaced_s, journal.receipt.restored_s, journal.receipt.resumed_s)
        assert list(times) == sorted(times)
    # A repair in which another worker failed forms more than one epoch.
    num_failures = sum(len(journal.failures) for journal in served.journals)
    assert all(completion.resumed <= num_failures for completion in served.completions.values())
    for counters in served.counters.values():
        assert counters.kv.get("corrupt", 0) == 0, counters


def assert_from_copies(served: Served) -> None:
    """All rows that tokens had been made of went on from copies, with few steps made again."""
    receipts = [journal.receipt for journal in served.journals if journal.receipt is not None]
    assert sum(receipt.rows.get("replica", 0) for receipt in receipts) > 0, receipts
    again = [number for receipt in receipts for number in receipt.steps_recomputed.values()]
    assert max(again, default=0) <= MOST_STEPS_AGAIN, receipts


def token_stage(kit: Kit, index: int) -> WorkerName:
    """Who has this stage of the token (or colocated) pipeline now."""
    return kit.plan_now.token_pipeline.stages[index].worker


def prompt_stage(kit: Kit, index: int) -> WorkerName:
    """Who has this stage of the prompt (or colocated) pipeline now."""
    return kit.plan_now.prompt_pipeline.stages[index].worker


class WhenCounted(Unwatched):
    """Acts once, as soon as the workload has so many tokens."""

    def __init__(self, kit: Kit, num_tokens: int, act: Callable[[], None]) -> None:
        self._kit, self._num_tokens, self._act = kit, num_tokens, act
        self.has_acted = False

    def stepped(self, microbatch: int, step: int) -> None:
        """See ``Watcher``."""
        if not self.has_acted and self._kit.observer.num_tokens >= self._num_tokens:
            self.has_acted = True
            self._act()


class AtEveryPhase(Unwatched):
    """Acts every time that the run comes to the phase, at most so often."""

    def __init__(self, phase: str, most: int, act: Callable[[], None]) -> None:
        self._phase, self._left, self._act = phase, most, act
        self.num_acted = 0

    def phase(self, name: str) -> None:
        """See ``Watcher``."""
        if name == self._phase and self._left > 0:
            self._left -= 1
            self.num_acted += 1
            self._act()


def killing(kit: Kit, worker: Callable[[], WorkerName]) -> Callable[[], None]:
    """``kill -9`` of whoever it is by then."""
    return lambda: kit.cluster.launcher.signal(worker(), signal.SIGKILL)


class StatusLog:
    """Every state of the cluster's conditions that the store had."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._changed = threading.Condition()
        self.seen: list[Conditions] = []

    def __call__(self, change: Change) -> None:
        with self._changed:
            for entry in change.puts:
                if entry.key == self._key:
                    self.seen.append(msgspec.json.decode(entry.value, type=dict[str, Condition]))
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[list[Conditions]], bool], what: str) -> list[Conditions]:
        """The states so far, once they are as wanted."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.seen), 30.0), f"{what}; got {self.seen}"
            return list(self.seen)


@contextlib.contextmanager
def status_log(store: StoreSpec, cluster: str = "dejavu") -> Iterator[StatusLog]:
    """The conditions are followed as people would."""
    keys = Keys(cluster)
    log = StatusLog(keys.status)
    watch = PrefixWatch(store, keys.status, log)
    try:
        yield log
    finally:
        watch.stop()


def is_open(address: str) -> bool:
    """True while somebody listens there."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False


def is_alive(pid: int) -> bool:
    """True while the process runs or is stopped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
