"""How long a microbatch takes through the whole model on one machine: what planner and simulator ask of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Costs(Protocol):
    """Times of one machine that holds the whole model. A stage of a pipeline of depth d takes a d-th of them."""

    @property
    def source(self) -> str:
        """For people: who measured the times, or what they were computed from."""

    def prompt_time_s(self, rows: int, tokens: float) -> float:
        """Y: ``rows`` prompts of ``tokens`` tokens each, together."""

    def step_time_s(self, rows: int, context: float) -> float:
        """t: one step of ``rows`` rows, each with ``context`` tokens behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCosts:
    """Two times that the user gives for a microbatch of ``rows`` rows, whatever their lengths.

    Prompts take as much longer as there are more rows; a step takes the same for any number (Appendix E).
    """

    rows: int
    whole_prompt_time_s: float
    """Y of ``rows`` rows."""
    whole_token_time_s: float
    """t."""

    @property
    def source(self) -> str:
        """For people: what the times were computed from."""
        return "profile.prompt_time_s and profile.token_time_s"

    def prompt_time_s(self, rows: int, tokens: float) -> float:
        """Y: in proportion to the rows."""
        return self.whole_prompt_time_s * (rows / self.rows)

    def step_time_s(self, rows: int, context: float) -> float:
        """t: as given."""
        return self.whole_token_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCosts:
    """Other costs with every time multiplied: those of a rehearsal that runs faster or slower than its profile."""

    costs: Costs
    scale: float

    @property
    def source(self) -> str:
        """For people: who measured the times."""
        return f"{self.costs.source}, times {self.scale:g}"

    def prompt_time_s(self, rows: int, tokens: float) -> float:
        """Y."""
        return self.costs.prompt_time_s(rows, tokens) * self.scale

    def step_time_s(self, rows: int, context: float) -> float:
        """t."""
        return self.costs.step_time_s(rows, context) * self.scale
