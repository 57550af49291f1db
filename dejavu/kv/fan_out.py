"""One message to several destinations out of one staging buffer: a step's cells to every holder of a copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from dejavu.kv.flush import Destination

logger = logging.getLogger(__name__)


class FanOut:
    """The ``Sender`` of an owner that is several destinations.

    A message has left when every destination is done with its memory. One that fails does the others no harm: it is
    logged once, and what it lacks is for whoever asks it what it holds. Any thread.
    """

    def __init__(self, destinations: Mapping[str, Destination]) -> None:
        if not destinations:
            raise ValueError("a message to nobody never leaves")
        self._destinations = dict(destinations)
        self._failed: set[str] = set()

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        """Every destination takes the message; the future fails only when none of them could."""
        whole = payload[0] if len(payload) == 1 else memoryview(b"".join(payload))
        count = _Countdown(len(self._destinations))
        for name, destination in self._destinations.items():
            self._put(name, destination, header, whole, count)
        return count.done

    def _put(self, name: str, destination: Destination, header: bytes, whole: memoryview, count: _Countdown) -> None:
        try:
            sent = destination.put(header, whole)
        except Exception as error:  # Whatever it is, the other destinations must still be served.
            self._note(name, error)
            count.one_done(error)
            return

        def finished(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                self._note(name, error)
            count.one_done(error)

        sent.add_done_callback(finished)

    def _note(self, name: str, error: BaseException) -> None:
        if name not in self._failed:
            self._failed.add(name)
            logger.warning("copies do not reach %s: %s", name, error)


class _Countdown:
    """A future that resolves with the last of several sends."""

    def __init__(self, count: int) -> None:
        self.done: Future[None] = Future()
        self._left = self._succeeded = 0
        self._left = count
        self._lock = threading.Lock()

    def one_done(self, error: BaseException | None) -> None:
        """One of them is done."""
        with self._lock:
            self._left -= 1
            self._succeeded += error is None
            is_last = self._left == 0
        if not is_last:
            return
        if self._succeeded:
            self.done.set_result(None)
        else:
            self.done.set_exception(error or RuntimeError("no destination took the message"))
