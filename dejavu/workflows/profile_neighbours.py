"""Workers that compute beside the one that is measured, as those of a cluster do that share a machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from dejavu.clock import Clock
from dejavu.config import Config
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError
from dejavu.report.progress import SilentProgress
from dejavu.request import Request
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.streaming_batch import Bench

_LEVEL = "off"
_END_TIMEOUT_S = 120.0
"""A batch that has begun is served to its end."""


@contextmanager
def neighbours(
    count: int, config: Config, plan: Plan, output: Path, clock: Clock, batch: Sequence[Request]
) -> Iterator[None]:
    """So many more workers of the same plan, each in a cluster of its own under ``output``, serve ``batch`` meanwhile.

    Raises DejavuError, at the end at the latest, when one of them failed.
    """
    with ExitStack() as stack:
        for index in range(1, count + 1):
            name = f"{config.cluster.name}-neighbour-{index}"
            folder = output / name
            folder.mkdir(parents=True)
            own = replace(config, cluster=replace(config.cluster, name=name))
            cluster = stack.enter_context(running_cluster(own, plan, folder, SilentProgress()))
            stack.enter_context(_Busy(Bench(cluster, plan, clock, lambda share: None), batch))
        yield


class _Busy:
    """The batch is served again and again while the ``with`` block runs."""

    def __init__(self, bench: Bench, batch: Sequence[Request]) -> None:
        self._bench = bench
        self._batch = batch
        self._is_enough = threading.Event()
        self._error: DejavuError | None = None
        self._thread = threading.Thread(target=self._run, name="neighbour", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_enough.set()
        self._thread.join(_END_TIMEOUT_S)
        if self._error is not None and error is None:
            raise DejavuError(f"a worker beside the measured one failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while not self._is_enough.is_set():
                self._bench.serve(_LEVEL, self._batch)
        # It is raised on the thread that measures.
        except DejavuError as error:
            self._error = error
