"""What the processes of a cluster on paper tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dejavu.control.holdings import HeldRow
from dejavu.control.ring import Step
from dejavu.ids import RowId, WorkerName
from dejavu.kv.layout import LayerRange

from harness.recovery_model import RowCells


@dataclass(frozen=True, slots=True)
class RunPrompt:
    """Activations of a whole prompt; token ids for the first stage."""

    row_id: RowId
    activations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptToken:
    """The token after a prompt."""

    row_id: RowId
    token: int


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a row's positions, for the pool (then its whole length is named) or as a copy."""

    row_id: RowId
    layers: LayerRange
    cells: RowCells
    whole: int
    is_copy: bool


@dataclass(frozen=True, slots=True)
class RunStep:
    """Activations of a step; token ids for the first stage."""

    step: Step
    activations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What the last stage sampled."""

    step: Step
    tokens: Mapping[RowId, int]


@dataclass(frozen=True, slots=True)
class RowReady:
    """A stage holds all that the row's next step reads."""

    row_id: RowId
    stage: int


@dataclass(frozen=True, slots=True)
class RowsEnded:
    """Rows that stage 0 let go."""

    row_ids: tuple[RowId, ...]


@dataclass(frozen=True, slots=True)
class AskHoldings:
    """What do you hold?"""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a worker holds, in pools and as copies."""

    worker: WorkerName
    rows: tuple[HeldRow, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """The last finished step of each microbatch."""

    steps: Mapping[int, int]
