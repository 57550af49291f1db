"""What workers and the controller say to each other. A message is one of these, msgpack-encoded, and raw bytes.

Every message carries the epoch of the plan it belongs to; a receiver refuses an older one. KV travels beside these
as ``kv.chunk.KvMessage``, told apart by the first byte of the header: a KvMessage is a msgpack array.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from dejavu.control.ring import AdmittedRow, StepRow
from dejavu.engine.message_parts import CopySpan as CopySpan
from dejavu.engine.message_parts import KvPart as KvPart
from dejavu.engine.message_parts import PromptRow as PromptRow
from dejavu.engine.message_parts import RestoredRow as RestoredRow
from dejavu.engine.message_parts import SendPart as SendPart
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.levels import StreamingLevel
from dejavu.report.counters import LiveFigures, WorkerCounters
from dejavu.request import TokenLogprobs

CONTROL = b"C"
"""First byte of a control message's header; no msgpack array begins with it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The base: who is meant is known from the link."""

    epoch: Epoch


class ExpectRows(Message, frozen=True):
    """Controller to every token stage: these rows' KV will come, for these places."""

    rows: tuple[PromptRow, ...]


class RunPrompt(Message, frozen=True):
    """Controller to prompt stage 0. Payload: token ids int32 [B, T], right-padded with zeros."""

    rows: tuple[PromptRow, ...]


class PromptActivations(Message, frozen=True):
    """Stage to stage. Payload: hidden states [B, T, E] of the model's dtype."""

    rows: tuple[PromptRow, ...]


class StepActivations(Message, frozen=True):
    """Stage to stage. Payload: hidden states [B, 1, E] of the slice of rows [first_row, first_row + B)."""

    microbatch: int
    step: int
    rows: tuple[StepRow, ...]


class PromptTokens(Message, frozen=True):
    """Last prompt stage to the controller: the first token of each row."""

    row_ids: tuple[RowId, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each token, None where the row did not ask; empty when none did."""


class StepTokens(Message, frozen=True):
    """Last token stage to stage 0 and to the controller: the next token of each row."""

    microbatch: int
    step: int
    row_ids: tuple[RowId, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """As of ``PromptTokens``; for the controller alone."""


class RowReady(Message, frozen=True):
    """A token stage to token stage 0: the rows' prompt KV is whole and in its pool."""

    row_ids: tuple[RowId, ...]
    stage: int


class AdmitRows(Message, frozen=True):
    """Controller to token stage 0: these rows join together once ready."""

    rows: tuple[AdmittedRow, ...]
    steps: dict[int, int] = {}
    """In a new epoch: the last finished step of each microbatch, which the next one is numbered after."""


class ReleaseRows(Message, frozen=True):
    """Controller to every token stage: forget these rows."""

    row_ids: tuple[RowId, ...]


class RowsEnded(Message, frozen=True):
    """Token stage 0 to the controller: no stage computes on these rows any more; their places are free."""

    row_ids: tuple[RowId, ...]


class RowsFailed(Message, frozen=True):
    """A worker to the controller: these rows cannot go on, and why. The controller tries again or gives up."""

    row_ids: tuple[RowId, ...]
    reason: str
    while_prompt: bool = False
    """True when the prompt microbatch itself failed, so no first token will come."""


class InspectRow(Message, frozen=True):
    """Controller to a token stage: send the KV cells of one place, for checks and debugging."""

    microbatch: int
    row_index: int
    length: int


class InspectedRow(Message, frozen=True):
    """The answer. Payload: [layer][K, V][head][position][dim] of the stage's layers."""

    stage: int


class InspectCopy(Message, frozen=True):
    """Controller to a memory stage: send a row's copy, for checks and debugging."""

    row_id: RowId
    length: int


class InspectedCopy(Message, frozen=True):
    """The answer. Payload: [layer][K, V][head][position][dim], none when fewer positions are here than asked for."""

    row_id: RowId
    length: int
    """Positions that are here, from 0 on, in every layer."""


class SendAgain(Message, frozen=True):
    """A receiver of KV to its sender: these parts came corrupt."""

    parts: tuple[KvPart, ...]


class AskHoldings(Message, frozen=True):
    """Controller to a stage that keeps rows: say which cells you hold."""


class Holdings(Message, frozen=True):
    """The answer. Payload: msgpack list of ``HeldRow``."""


class RestoreRows(Message, frozen=True):
    """Controller to a token stage: these rows go on; once they are whole, copy what was lost again."""

    rows: tuple[RestoredRow, ...]
    copies: tuple[CopySpan, ...] = ()


class SendRows(Message, frozen=True):
    """Controller to a holder of cells: send them."""

    parts: tuple[SendPart, ...]


class ForgetSources(Message, frozen=True):
    """Controller to every worker: all rows go on; what was kept only to restore them may go."""


class LinkLost(Message, frozen=True):
    """A worker to the controller: a link with another worker has ended, and why."""

    peer: str
    reason: str


class SetStreaming(Message, frozen=True):
    """Controller to every worker, while no request is open: KV leaves in this way from now on."""

    level: StreamingLevel


class AskReport(Message, frozen=True):
    """Controller to a worker: send counters and spans."""


class Report(Message, frozen=True):
    """A worker's account of itself. Payload: msgpack list of spans."""

    worker: WorkerName
    counters: WorkerCounters


class AskMeters(Message, frozen=True):
    """Controller to a worker, about once a second: say what you have counted. Nothing waits for it or is drained."""


class Meters(Message, frozen=True):
    """The answer."""

    worker: WorkerName
    figures: LiveFigures


class Stop(Message, frozen=True):
    """Controller to a worker: end cleanly."""

    reason: Literal["done", "abort"] = "done"


AnyMessage: TypeAlias = (
    ExpectRows
    | RunPrompt
    | PromptActivations
    | StepActivations
    | PromptTokens
    | StepTokens
    | RowReady
    | AdmitRows
    | ReleaseRows
    | RowsEnded
    | RowsFailed
    | InspectRow
    | InspectedRow
    | InspectCopy
    | InspectedCopy
    | SendAgain
    | AskHoldings
    | Holdings
    | RestoreRows
    | SendRows
    | ForgetSources
    | LinkLost
    | SetStreaming
    | AskReport
    | Report
    | AskMeters
    | Meters
    | Stop
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The header to send."""
    return CONTROL + _ENCODER.encode(message)


def decode(header: bytes) -> AnyMessage:
    """The message of a header that begins with ``CONTROL``. Raises msgspec.DecodeError."""
    return _DECODER.decode(memoryview(header)[1:])
