"""One request as the event loop sees it: what its listener is told on the controller's thread comes out here."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from dejavu.request import Completion, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """One more token, and the text that has become certain with it."""

    token: int
    text: str
    start: int
    """Where in the answer's text its own begins."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class End:
    """The request's end, and the rest of its text."""

    line: Completion
    rest: str
    num_cut: int
    """So many of the last tokens have no part in the text."""


Told: TypeAlias = Piece | End


class Following:
    """A ``Listener`` whose news one task of the loop takes. The loop is woken once for all that has gathered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._told: deque[Told] = deque()
        self._is_waking = False
        self._has_news = asyncio.Event()
        self.has_ended = False
        """Whether the request has its end, taken from here or not."""

    def started(self) -> None:
        """See ``Listener``."""

    def token(self, token: int, text: str, start: int, logprobs: TokenLogprobs | None) -> None:
        """See ``Listener``."""
        self._tell(Piece(token, text, start, logprobs))

    def ended(self, completion: Completion, rest: str, num_cut: int) -> None:
        """See ``Listener``."""
        self.has_ended = True
        self._tell(End(completion, rest, num_cut))

    async def news(self) -> list[Told]:
        """What has come since the last call, at least one; the last of all is an ``End``."""
        await self._has_news.wait()
        self._has_news.clear()
        with self._lock:
            self._is_waking = False
            told = list(self._told)
            self._told.clear()
        return told

    def _tell(self, one: Told) -> None:
        with self._lock:
            self._told.append(one)
            is_first, self._is_waking = not self._is_waking, True
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._has_news.set)
            except RuntimeError:
                # The loop is closed, at the end of the server: nobody is there to hear.
                pass
