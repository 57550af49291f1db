"""One request on its way through a simulated cluster: counts instead of tokens.

A token's value is its number: 1 is the request's first. So a token that is lost, doubled or foreign shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dejavu.control.admission import Assigned
from dejavu.control.ending import FinishReason, Limits, ending
from dejavu.control.ring import AdmittedRow
from dejavu.errors import InvalidTransition
from dejavu.request import Request


@dataclass(slots=True, kw_only=True)
class RequestState:
    """A request that was sent to a pipeline. Mutable; its cluster owns it."""

    request: Request
    num_tokens: int = 0
    """Its user has so many."""
    replayed: int = 0
    """The last so many of them are being made again."""
    first_token_s: float | None = None
    end_s: float | None = None
    num_resumed: int = 0
    landed: set[int] = field(default_factory=set)
    """Token stages that hold its prompt's KV."""
    copied: set[int] = field(default_factory=set)
    """Token stages whose successors hold what the stage held of it at first."""
    base_cells: int = 0
    """Positions that a token stage held before the row's first step."""
    first_step: int | None = None
    """Its microbatch's step that was its first in this epoch."""
    is_waiting: bool = False
    """Its prompt is done, and its first step has yet to begin."""

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return len(self.request.prompt_tokens)

    @property
    def num_done(self) -> int:
        """New tokens that the cluster has made in its present course."""
        return self.num_tokens - self.replayed

    @property
    def limits(self) -> Limits:
        """It ends by its length: how long an answer becomes is known here from the start."""
        return Limits(max_tokens=self.request.max_tokens)

    def begin_anew(self, replayed: int, base_cells: int) -> None:
        """Nothing of it lies on any stage any more; the last ``replayed`` tokens are made again."""
        self.replayed, self.base_cells, self.first_step = replayed, base_cells, None
        self.landed, self.copied, self.is_waiting = set(), set(), False

    def take(self, token: int, now_s: float) -> FinishReason | None:
        """The token has come. Returns why it ends the request, or None.

        Raises InvalidTransition for any token but the one that is due.
        """
        if token != self.num_done + 1:
            raise InvalidTransition(
                f"request {self.request.id}: its token {token} came, and its token {self.num_done + 1} is due"
            )
        if self.replayed:
            self.replayed -= 1
            return None
        self.num_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = now_s
        return ending(token, self.num_tokens, self.limits)

    def admitted(self, row: Assigned, *, ready_stages: int | None = None) -> AdmittedRow:
        """The row as token stage 0 takes it."""
        done = self.num_done
        return AdmittedRow(
            row_id=row.row_id,
            microbatch=row.slot.microbatch,
            row_index=row.slot.row_index,
            position=self.num_prompt + done - 1,
            token=done,
            num_generated=done,
            limits=self.limits,
            known=tuple(range(done + 1, self.num_tokens + 1)),
            ready_stages=ready_stages,
        )
