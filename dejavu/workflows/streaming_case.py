"""The clusters of a measurement, declared by one configuration: a case for each model and destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dejavu.config import Config
from dejavu.config.strategy import StreamTo
from dejavu.control.placement import place
from dejavu.control.plan import Plan
from dejavu.ids import FIRST_EPOCH
from dejavu.models.spec import ModelSpec
from dejavu.report.progress import Progress, Unit
from dejavu.request import Request
from dejavu.workflows.preparation import declared, prepare_model
from dejavu.workload import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cluster and what it will serve."""

    model: str
    destination: str
    config: Config
    """The declaration of this cluster alone."""
    plan: Plan
    requests: Sequence[Request]
    batches: tuple[int, ...]
    levels: tuple[str, ...]
    repeats: int

    @property
    def label(self) -> str:
        """Its name in files and on the progress bar."""
        return f"{self.model}-{self.destination}"

    @property
    def num_batches(self) -> int:
        """Batches that it will serve, one of each size for warming up."""
        return len(self.batches) * (1 + self.repeats * len(self.levels))


def prepare_cases(config: Config, progress: Progress) -> list[Case]:
    """Every model lies in its folder, every plan is made, nothing runs. Raises ConfigError or InfeasibleError."""
    measurement = config.measurement
    cases = []
    for kind in measurement.models:
        of_model = replace(config, model=replace(config.model, kind=kind, max_length=_length(config)))
        spec = prepare_model(of_model.model, progress)
        cases += [_case(kind, destination, of_model, spec) for destination in measurement.destinations]
    return cases


def _length(config: Config) -> int:
    """Just enough positions: a longer buffer would cost memory and show nothing."""
    workload = config.workload
    return config.model.max_length or (workload.prompt_tokens or 0) + (workload.max_tokens or 0)


def _case(kind: str, destination: StreamTo, of_model: Config, spec: ModelSpec) -> Case:
    config = replace(of_model, strategy=replace(of_model.strategy, stream_to=destination))
    measurement = config.measurement
    return Case(
        model=kind,
        destination=destination.value,
        config=config,
        plan=place(declared(config), spec, epoch=FIRST_EPOCH),
        requests=load(config.workload, codec=None, vocab_size=spec.vocab_size, avoid=spec.eos_token_ids),
        batches=tuple(measurement.batches),
        levels=tuple(level.value for level in measurement.levels),
        repeats=measurement.repeats,
    )


class BatchBar:
    """How far a measurement has come: batches that are over, and the part of the one under way."""

    def __init__(self, progress: Progress, num_batches: int) -> None:
        self._progress = progress
        self._num_batches = num_batches
        self._num_done = 0
        self._what = ""

    def begin(self, what: str) -> None:
        """A batch is under way."""
        self._what = what
        self.part(0.0)

    def part(self, share: float) -> None:
        """That share of it is done."""
        self._progress.batches(self._num_done + share, self._num_batches, self._what)

    def end(self) -> None:
        """It is over."""
        self._num_done += 1
        self._progress.batches(self._num_done, self._num_batches, self._what)


class LabelledProgress:
    """The progress of one cluster among several: its phases bear its label, so that each is shown."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._label = label

    def phase(self, description: str, done: float, total: float | None, unit: Unit = "items") -> None:
        """The phase is shown under the label."""
        self._progress.phase(f"{self._label}: {description}", done, total, unit)

    def requests(self, ended: int, submitted: int, num_tokens: int, num_failed: int = 0) -> None:
        """Passed on."""
        self._progress.requests(ended, submitted, num_tokens, num_failed)

    def batches(self, done: float, total: int, what: str) -> None:
        """Passed on."""
        self._progress.batches(done, total, what)

    def note(self, text: str) -> None:
        """The line is shown under the label."""
        self._progress.note(f"{self._label}: {text}")

    def close(self) -> None:
        """Nothing: the whole measurement's progress goes on."""
