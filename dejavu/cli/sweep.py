"""A sweep as people follow it: a line for each point, then a table of all, and the failed ones with their reasons."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dejavu.cli.job import ExitCode, JobEnd
from dejavu.report.amounts import show_seconds
from dejavu.report.streaming_table import write_table
from dejavu.report.sweep_table import SweepPoint, sweep_rows

Overrides = Sequence[str]


class Sweep:
    """The points of one command. Mutable; the command owns it.

    Args:
        points: the overrides of every point in order, as far as they were known before the first one.
    """

    def __init__(self, points: Sequence[Overrides]) -> None:
        self._points = points
        self._swept = swept_keys(points)
        self._ended: list[JobEnd] = []

    def begin(self, number: int, overrides: Overrides) -> None:
        """A person sees which point is under way."""
        _line(f"{self._place(number)}: {self._label(overrides)}")

    def end(self, job: JobEnd) -> None:
        """A person sees that it is over; why it failed has been told already."""
        self._ended.append(job)
        outcome = "done" if job.code is ExitCode.DONE else "failed"
        _line(f"{self._place(job.number)}: {outcome} in {show_seconds(job.took_s)}")

    def close(self, folder: Path) -> None:
        """``table.csv`` in ``folder`` has a row for each point that ended; the failed ones are named once more."""
        if not self._ended:
            return
        write_table(folder / "table.csv", sweep_rows([self._point(job) for job in self._ended]))
        failed = [job for job in self._ended if job.code is not ExitCode.DONE]
        if failed:
            _line(f"{len(failed)} of {max(len(self._points), len(self._ended))} points failed:")
        for job in failed:
            _line(f"  job {job.number} ({self._label(job.overrides)}): {first_line(job.reason)}")
        _line(f"table of the sweep: {folder / 'table.csv'}")

    def _place(self, number: int) -> str:
        """The number is that of the job's folder."""
        return f"job {number} ({number + 1} of {max(number + 1, len(self._points))})"

    def _label(self, overrides: Overrides) -> str:
        """What distinguishes the point; all of its overrides where nothing does."""
        own = [text for text in overrides if _key(text) in self._swept]
        return " ".join(own or overrides) or "no overrides"

    def _point(self, job: JobEnd) -> SweepPoint:
        swept = {_key(text): text.partition("=")[2] for text in job.overrides}
        keys = self._swept or tuple(swept)
        return SweepPoint(
            number=job.number,
            swept={key: swept[key] for key in keys if key in swept},
            outcome=job.code.name.lower(),
            reason=first_line(job.reason),
            folder=job.output,
        )


def swept_keys(points: Sequence[Overrides]) -> tuple[str, ...]:
    """The keys whose values are not the same in all points, in the order of the command."""
    values: dict[str, set[str]] = {}
    for text in (text for point in points for text in point):
        values.setdefault(_key(text), set()).add(text)
    return tuple(key for key, texts in values.items() if len(texts) > 1)


def first_line(text: str) -> str:
    """What a list or a table has room for; the log has the rest."""
    return text.partition("\n")[0]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
