"""Where a controller's requests and rows stand at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.control.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Counts of open requests and of rows, and the plan in force."""

    plan: Plan
    is_between: bool
    """Between two epochs: nothing runs."""
    is_changing: bool
    """Between two epochs by a change of the declared state, and not by a repair."""
    lost: tuple[str, ...] = ()
    """Workers of the epoch in force whose links have broken: each of them may be dead."""
    num_waiting: int
    """Open requests whose prompts were not sent, or are to be sent anew."""
    num_running: int
    num_rows_taken: int

    @property
    def num_rows(self) -> int:
        """Rows of the token pipeline."""
        return self.plan.token_pipeline.in_flight * self.plan.token_pipeline.microbatch_rows
