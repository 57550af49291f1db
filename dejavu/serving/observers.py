"""Several observers in the place of one."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.ids import RequestId
from dejavu.request import Completion
from dejavu.serving.ledger import Observer


class Observers:
    """Tells each of them, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def token(self, request_id: RequestId, at_s: float) -> None:
        """See ``Observer``."""
        for observer in self._observers:
            observer.token(request_id, at_s)

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """See ``Observer``."""
        for observer in self._observers:
            observer.ended(completion, token_times_s)
