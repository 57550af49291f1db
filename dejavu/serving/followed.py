"""A request's listener as the controller calls it: what happens is counted, and no fault of a listener gets through."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dejavu.request import Completion, Request, TokenLogprobs
from dejavu.serving.source import Listener
from dejavu.serving.tally import Tally

logger = logging.getLogger(__name__)


class Followed:
    """A ``Listener`` before another one."""

    def __init__(self, tally: Tally, request: Request, listener: Listener) -> None:
        self._tally = tally
        self._request = request
        self._listener = listener
        self._is_first = True

    def started(self) -> None:
        """See ``Listener``."""
        self._tally.started(self._request.id)
        self._guarded(self._listener.started)

    def token(self, token: int, text: str, start: int, logprobs: TokenLogprobs | None) -> None:
        """See ``Listener``."""
        self._tally.token(len(self._request.prompt_tokens) if self._is_first else 0)
        self._is_first = False
        self._guarded(lambda: self._listener.token(token, text, start, logprobs))

    def ended(self, completion: Completion, rest: str, num_cut: int) -> None:
        """See ``Listener``."""
        self._guarded(lambda: self._listener.ended(completion, rest, num_cut))
        # Last: whoever waits for the service to be empty may then rely on every listener having been told.
        self._tally.ended(completion)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        # Its user's connection may be in any state, and the controller serves all the others.
        except Exception:
            logger.exception("the listener of request %s failed", self._request.id)
