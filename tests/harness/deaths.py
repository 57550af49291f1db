"""Taps that kill a worker of a local cluster at a moment of the run, known by the message that it is about to send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dejavu.engine import messages as m
from dejavu.kv.chunk import KvMessage, decode_message

from harness.local_wire import Killed

AnyLetter: TypeAlias = m.AnyMessage | KvMessage


@dataclass(slots=True)
class Death:
    """``worker`` dies, and ``others`` with it, when it is about to send the ``count``-th message that ``matches``.

    ``matches`` gets a message of KV as well.
    """

    worker: str
    matches: Callable[[AnyLetter], bool]
    count: int = 1
    others: tuple[str, ...] = ()
    is_over: bool = field(default=False, init=False)

    def see(self, sender: str, message: AnyLetter) -> None:
        """Raises Killed at the moment."""
        if self.is_over or sender != self.worker or not self.matches(message):
            return
        self.count -= 1
        if self.count == 0:
            self.is_over = True
            raise Killed(self.worker, *self.others)


class Deaths:
    """A tap: each death once, each worker when it is its time."""

    def __init__(self, *deaths: Death) -> None:
        self.deaths: Sequence[Death] = deaths
        self.seen: list[tuple[str, str, m.AnyMessage]] = []
        """Every control message of the run: sender, peer, message."""

    def __call__(self, sender: str, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        message = m.decode(header) if header[:1] == m.CONTROL else decode_message(header)
        for death in self.deaths:
            death.see(sender, message)
        if not isinstance(message, KvMessage):
            self.seen.append((sender, peer, message))
        return [(header, payload)]

    def sent(self, kind: type[m.Message], sender: str | None = None) -> list[m.AnyMessage]:
        """What was sent of that kind."""
        return [one for name, _, one in self.seen if isinstance(one, kind) and sender in (None, name)]

    @property
    def are_over(self) -> bool:
        """True when everybody died who was to."""
        return all(death.is_over for death in self.deaths)


def prompt_done(message: AnyLetter) -> bool:
    """A stage has computed a prompt microbatch."""
    return isinstance(message, m.PromptActivations | m.PromptTokens)


def step_done(step: int) -> Callable[[AnyLetter], bool]:
    """A stage has computed that step of a microbatch."""
    return lambda message: isinstance(message, m.StepActivations | m.StepTokens) and message.step == step


def says(kind: type[m.Message] | type[KvMessage]) -> Callable[[AnyLetter], bool]:
    """A message of that kind."""
    return lambda message: isinstance(message, kind)
