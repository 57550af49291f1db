"""The measurement of swapping in rows: every run (``rounds.csv``), and B against what swaps (``table.csv``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from dejavu.report.streaming_table import Columns

RESIDENT, EQUAL, DOUBLE = "B", "B swapped", "2B swapped"
CASES = (RESIDENT, EQUAL, DOUBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRun:
    """One run of one case."""

    model: str
    batch: int
    """B."""
    length: int
    """Tokens of a request, prompt and answer together."""
    case: str
    rows: int
    """Of its microbatches."""
    round_index: int
    turn: int
    """Its place among the cases of its round."""
    wall_s: float
    tokens_per_s: float
    prompt_s: float
    """Computation of a prompt microbatch at the slowest stage, median."""
    step_s: float
    """Computation of a step at the slowest stage, median."""
    steps: int
    """Of all stages."""
    bytes_in: int
    bytes_out: int
    unused_bytes: int
    waits: int
    wait_s: float
    """In which computing threads stood still for copies."""
    busy_s: float
    """Copying, on any thread."""
    own_s: float
    """Of it by computing threads themselves."""

    @property
    def columns(self) -> Columns:
        """Its row of ``rounds.csv``."""
        return {
            "model": self.model,
            "batch": self.batch,
            "length": self.length,
            "case": self.case,
            "rows": self.rows,
            "round": self.round_index + 1,
            "turn": self.turn,
            "wall_s": self.wall_s,
            "tokens_per_s": self.tokens_per_s,
            "prompt_ms": self.prompt_s * 1e3,
            "step_ms": self.step_s * 1e3,
            "steps": self.steps,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "unused_bytes": self.unused_bytes,
            "waits": self.waits,
            "wait_s": self.wait_s,
            "copy_s": self.busy_s,
            "own_copy_s": self.own_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSummary:
    """All rounds of one case."""

    model: str
    batch: int
    length: int
    case: str
    rows: int
    tokens_per_s: float
    """Median."""
    gains: tuple[float, ...]
    """Of each round: its tokens per second over those of B without swapping in the same round."""
    prompt_s: float
    step_s: float
    bytes_a_step: float
    """In and out, of one stage."""
    wait_share: float
    """Seconds in which computing threads stood still for copies, over those that stages had."""
    own_share: float
    """Seconds in which they copied themselves, over the same."""

    @property
    def gain(self) -> float:
        """The median over the rounds."""
        return median(self.gains)


def summarise_swaps(runs: Sequence[SwapRun], num_stages: int) -> list[SwapSummary]:
    """A summary for each (model, batch, length, case), in the order in which they first came."""
    resident = {(*_place(one), one.round_index): one for one in runs if one.case == RESIDENT}
    groups: dict[tuple[str, int, int, str], list[SwapRun]] = {}
    places = list(dict.fromkeys(map(_place, runs)))
    for run in sorted(runs, key=lambda one: (places.index(_place(one)), CASES.index(one.case))):
        groups.setdefault((*_place(run), run.case), []).append(run)
    return [
        SwapSummary(
            model=model,
            batch=batch,
            length=length,
            case=case,
            rows=own[0].rows,
            tokens_per_s=median(one.tokens_per_s for one in own),
            gains=tuple(
                one.tokens_per_s / resident[model, batch, length, one.round_index].tokens_per_s
                for one in own
                if (model, batch, length, one.round_index) in resident
            ),
            prompt_s=median(one.prompt_s for one in own),
            step_s=median(one.step_s for one in own),
            bytes_a_step=median((one.bytes_in + one.bytes_out) / max(1, one.steps) for one in own),
            wait_share=median(one.wait_s / (one.wall_s * num_stages) for one in own),
            own_share=median(one.own_s / (one.wall_s * num_stages) for one in own),
        )
        for (model, batch, length, case), own in groups.items()
    ]


def _place(run: SwapRun) -> tuple[str, int, int]:
    return run.model, run.batch, run.length


def swap_rows(summaries: Iterable[SwapSummary]) -> list[Columns]:
    """The rows of ``table.csv`` (DejaVu Fig. 13)."""
    return [
        {
            "model": one.model,
            "batch": one.batch,
            "case": one.case,
            "rows": one.rows,
            "tokens_per_s": one.tokens_per_s,
            "gain": one.gain,
            "step_ms": one.step_s * 1e3,
            "swapped_mb_a_step": one.bytes_a_step / 1e6,
            "wait_percent": one.wait_share * 100,
            "own_copy_percent": one.own_share * 100,
        }
        for one in summaries
    ]
