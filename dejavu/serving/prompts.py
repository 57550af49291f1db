"""A prompt microbatch as it is sent to prompt stage 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dejavu.control.admission import Assigned
from dejavu.engine import messages as m
from dejavu.transport.base import Buffer


def prompt_row(row: Assigned) -> m.PromptRow:
    """The row as stages know it."""
    sampling = row.request.sampling
    return m.PromptRow(
        row.row_id,
        row.slot.microbatch,
        row.slot.row_index,
        row.length,
        None if sampling.is_plain else sampling,
    )


def padded_ids(rows: Sequence[Assigned], new_tokens: Sequence[Sequence[int]]) -> Buffer:
    """Token ids int32 [B, T], zeros behind each row's end: prompts, each followed by the new tokens that are known."""
    ids = np.zeros((len(rows), max(row.length for row in rows)), dtype=np.int32)
    for index, (row, tokens) in enumerate(zip(rows, new_tokens, strict=True)):
        ids[index, : row.length] = (*row.request.prompt_tokens, *tokens[: row.num_known])
    return ids.view(np.uint8).reshape(-1).data
