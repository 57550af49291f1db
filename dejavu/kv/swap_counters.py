"""What swapping has cost a stage: bytes, seconds of copying, and seconds that the computing thread stood still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCounters:
    """Since the start."""

    bytes_in: int = 0
    bytes_out: int = 0
    unused_bytes: int = 0
    """Of ``bytes_in``: brought in for nothing, because another microbatch came or the row ended."""
    busy_s: float = 0.0
    """Copying, on any thread."""
    own_s: float = 0.0
    """Of ``busy_s``: by the computing thread itself, which computed nothing meanwhile."""
    wait_s: float = 0.0
    """The computing thread stood still: a step's cells were not in, or cells that somebody reads were not out."""
    steps: int = 0
    waits: int = 0
    """How often it did."""

    def __add__(self, other: SwapCounters) -> SwapCounters:
        """Both together."""
        return SwapCounters(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(slots=True)
class SwapTally:
    """The same while it grows: several times a step, so that nothing is made anew. Its owner holds a lock."""

    bytes_in: int = 0
    bytes_out: int = 0
    busy_s: float = 0.0
    own_s: float = 0.0
    wait_s: float = 0.0
    steps: int = 0
    waits: int = 0

    def copied(self, way: Literal["in", "out"], num_bytes: int, taken_s: float, *, is_own: bool) -> None:
        """A copy has ended; ``is_own``: the computing thread made it."""
        self.busy_s += taken_s
        self.own_s += taken_s if is_own else 0.0
        if way == "in":
            self.bytes_in += num_bytes
        else:
            self.bytes_out += num_bytes

    def counters(self, *, unused_bytes: int) -> SwapCounters:
        """As they are now."""
        return SwapCounters(
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            unused_bytes=unused_bytes,
            busy_s=self.busy_s,
            own_s=self.own_s,
            wait_s=self.wait_s,
            steps=self.steps,
            waits=self.waits,
        )
