"""Times out of published fits: linear in the number of tokens, with a term for attention (DistServe's form)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCosts:
    """Coefficients in seconds. Nothing is below 0, although a fit may be."""

    source: str
    """For people: who measured the times."""
    prompt_fit: tuple[float, float, float]
    """a + b·S + c·Q, S the sum of the prompts' lengths and Q that of their squares."""
    step_fit: tuple[float, float, float]
    """a + b·K + c·rows, K the sum of the rows' contexts."""
    many_rows_fit: tuple[float, float, float]
    """The same, from ``many_rows_from`` rows on."""
    many_rows_from: int

    def prompt_time_s(self, rows: int, tokens: float) -> float:
        """Y."""
        constant, linear, quadratic = self.prompt_fit
        return max(0.0, constant + linear * rows * tokens + quadratic * rows * tokens**2)

    def step_time_s(self, rows: int, context: float) -> float:
        """t."""
        constant, linear, per_row = self.step_fit if rows < self.many_rows_from else self.many_rows_fit
        return max(0.0, constant + linear * rows * context + per_row * rows)
