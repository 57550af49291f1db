"""Flow control: what a sender may have on its way, and what a receiver still owes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditLimit:
    """What a listener lets each link have un-released."""

    messages: int
    num_bytes: int

    def __post_init__(self) -> None:
        if self.messages < 1 or self.num_bytes < 1:
            raise ValueError(f"credits of {self.messages} messages and {self.num_bytes} bytes; both must be at least 1")


class SenderCredits:
    """The sender's count. A message larger than all the bytes may go when it goes alone."""

    def __init__(self, limit: CreditLimit) -> None:
        self._limit = limit
        self._messages = 0
        self._num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """True when a message of this size may be sent now."""
        if self._messages == 0:
            return True
        return self._messages < self._limit.messages and self._num_bytes + num_bytes <= self._limit.num_bytes

    def spend(self, num_bytes: int) -> None:
        """A message of this size is on its way."""
        self._messages += 1
        self._num_bytes += num_bytes

    def gain(self, messages: int, num_bytes: int) -> None:
        """The receiver has released this much. Raises ValueError for more than was sent."""
        if not (0 <= messages <= self._messages and 0 <= num_bytes <= self._num_bytes):
            raise ValueError(f"credits for {messages} messages and {num_bytes} bytes that were never sent")
        self._messages -= messages
        self._num_bytes -= num_bytes


class ReceiverCredits:
    """The receiver's count: what it holds, and what it has released but not yet reported."""

    def __init__(self, limit: CreditLimit) -> None:
        self._limit = limit
        self._held_messages = 0
        self._held_bytes = 0
        self._owed_messages = 0
        self._owed_bytes = 0
        self._wanted = False

    def hold(self, num_bytes: int) -> bool:
        """Takes a message; False when the sender had no credits for it."""
        messages = self._held_messages + self._owed_messages
        total = self._held_bytes + self._owed_bytes + num_bytes
        self._held_messages += 1
        self._held_bytes += num_bytes
        return messages == 0 or (messages < self._limit.messages and total <= self._limit.num_bytes)

    def release(self, num_bytes: int) -> None:
        """A held message of this size is dealt with."""
        self._held_messages -= 1
        self._held_bytes -= num_bytes
        self._owed_messages += 1
        self._owed_bytes += num_bytes

    def want(self) -> None:
        """The sender waits: the next report is not to be put off."""
        self._wanted = True

    def report(self) -> tuple[int, int] | None:
        """Messages and bytes to give back now, or None while so little is owed that a frame for it would be waste."""
        if self._owed_messages == 0:
            return None
        much = 4 * self._owed_messages >= self._limit.messages or 4 * self._owed_bytes >= self._limit.num_bytes
        if not (self._wanted or much):
            return None
        owed = (self._owed_messages, self._owed_bytes)
        self._owed_messages = self._owed_bytes = 0
        self._wanted = False
        return owed
