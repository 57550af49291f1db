"""One stage's computation: rows and activations in, activations or tokens out. Holds the stage's model and KV pool.

Shape legend: B rows of a pass, T positions of a pass, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dejavu.control.plan import Place
from dejavu.control.ring import StepRow
from dejavu.engine.messages import PromptRow
from dejavu.kv.flush import bytes_tensor
from dejavu.kv.pool import KvPool
from dejavu.kv.writers import PromptWriter, StepWriter, StreamingWriter
from dejavu.models.computation import StageComputation
from dejavu.models.sampling import log_probabilities, sample
from dejavu.request import Sampling, TokenLogprobs
from dejavu.transport.base import Buffer

_GREEDY = Sampling()

LayerHook = Callable[[int, Tensor, Tensor], None]
"""Gets (global layer, keys [B,H,T,D], values [B,H,T,D]) of a prompt layer as soon as they are there."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows' next tokens."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each token, None where the row did not ask; empty when none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """The contiguous rows of a microbatch that a step computes: from its first live row to its last."""

    first_row: int
    """In the pool."""
    num_rows: int
    live: tuple[int, ...]
    """Indices of live rows within the slice."""

    @classmethod
    def of(cls, rows: Sequence[StepRow], first_pool_row: int) -> RowSlice:
        """The slice for ``rows``, ascending by row index, of the microbatch that begins at ``first_pool_row``."""
        low, high = rows[0].row_index, rows[-1].row_index
        return cls(
            first_row=first_pool_row + low,
            num_rows=high - low + 1,
            live=tuple(row.row_index - low for row in rows),
        )


class StageCompute:
    """Runs prompts and steps through this stage's layers.

    Args:
        pool: the rows of a token or colocated stage; None for a prompt stage, which keeps no KV.
        step_pool: what steps read and write, where that is not ``pool``.
    """

    def __init__(
        self, model: StageComputation, place: Place, *, pool: KvPool | None, step_pool: KvPool | None = None
    ) -> None:
        self._model = model
        self._place = place
        self._pool = pool
        self._step_pool = step_pool or pool

    def prompt(
        self,
        rows: Sequence[PromptRow],
        inputs: Tensor,
        on_layer: LayerHook | None,
        on_written: Callable[[int], None] | None = None,
    ) -> Tensor:
        """KV of the rows is in the pool or with ``on_layer``. Returns hidden [B,T,E], or logits [B,V] if last.

        ``on_written`` is told of each layer that is in the pool, if there is one.
        """
        lengths = [row.length for row in rows]
        sink: PromptWriter | StreamingWriter
        if self._pool is None:
            assert on_layer is not None
            sink = StreamingWriter(on_layer)
        else:
            places = [self._pool_row(row.microbatch, row.row_index) for row in rows]
            sink = PromptWriter(self._pool, places, lengths, on_written)
        return self._model.prompt(inputs, lengths, sink)

    def step(self, first_row: int, rows: Sequence[StepRow], inputs: Tensor | None) -> Tensor:
        """Every row has one more KV cell. Returns hidden [B,1,E] or logits [B,V] of the whole slice.

        Args:
            first_row: where the microbatch begins in the pool for steps.
            rows: live rows, ascending by row index.
            inputs: hidden [B,1,E]; None on the first stage, which takes the rows' tokens.
        """
        assert self._step_pool is not None
        part = RowSlice.of(rows, first_row)
        positions = [0] * part.num_rows
        for index, row in zip(part.live, rows, strict=True):
            positions[index] = row.position
        if inputs is None:
            inputs = torch.zeros(part.num_rows, 1, dtype=torch.int64, device=self._model.device)
            inputs[list(part.live), 0] = torch.tensor([row.token for row in rows], device=self._model.device)
        sink = StepWriter(self._step_pool, part.first_row, part.num_rows, part.live, positions)
        return self._model.step(inputs, positions, sink)

    def sample_prompt(self, rows: Sequence[PromptRow], logits_BV: Tensor) -> Sampled:
        """The first token of each row."""
        params = [row.sampling or _GREEDY for row in rows]
        return _sampled(logits_BV, params, [row.length for row in rows])

    def sample_step(self, rows: Sequence[StepRow], logits_BV: Tensor) -> Sampled:
        """The next token of each live row, in the order of ``rows``."""
        low = rows[0].row_index
        live_BV = logits_BV if len(rows) == len(logits_BV) else logits_BV[[row.row_index - low for row in rows]]
        params = [row.sampling or _GREEDY for row in rows]
        return _sampled(live_BV, params, [row.position + 1 for row in rows])

    def _pool_row(self, microbatch: int, row_index: int) -> int:
        return microbatch * self._place.pipeline.microbatch_rows + row_index


def _sampled(logits_BV: Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> Sampled:
    tokens = sample(logits_BV, params, positions)
    return Sampled(tuple(tokens), log_probabilities(logits_BV, params, tokens))


def tensor_of(payload: Buffer, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bytes as a tensor of ``shape`` (one -1 allowed); on a CPU without a copy unless they are read-only."""
    return bytes_tensor(payload).view(dtype).reshape(list(shape)).to(device)


def buffer_of(tensor: Tensor) -> Buffer:
    """The tensor's bytes, contiguous; on a CPU without a copy. The tensor must live as long as the buffer."""
    host = tensor.contiguous().cpu()
    return host.view(torch.uint8).reshape(-1).numpy().data


def prompt_ids(payload: Buffer, num_rows: int, device: torch.device) -> Tensor:
    """Token ids int64 [B, T] out of a ``RunPrompt`` payload."""
    ids = np.frombuffer(payload, dtype=np.int32).reshape(num_rows, -1)
    return torch.from_numpy(ids.astype(np.int64)).to(device)
