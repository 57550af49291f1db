"""Attention of a step gives what torch's own gives, over every layout of the buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.models.attention import additive, step_mask
from dejavu.models.step_attention import MIN_CELLS, StepAttention

BATCH, HEADS, GROUP, HEAD_DIM, POSITIONS = 5, 3, 4, 16, 200


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Query and mask of rows of different lengths."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, GROUP, HEAD_DIM, generator=generator).to(dtype)
    mask = step_mask(torch.tensor([0, 3, 150, 199, 77]), POSITIONS, None)
    return query, additive(mask, torch.float32)


def _buffer(layout: str, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values [B, H, S, D] as views of larger buffers."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    match layout:
        case "rows of a pool":
            return random(9, HEADS, 256, HEAD_DIM)[2 : 2 + BATCH, :, :POSITIONS]
        case "some heads of a pool":
            return random(BATCH, 7, 256, HEAD_DIM)[:, 3:6, :POSITIONS]
        case "positions before heads":
            return random(BATCH, POSITIONS, HEADS, HEAD_DIM).transpose(1, 2)
        case _:
            return random(BATCH, HEADS, POSITIONS, HEAD_DIM + 3)[..., 1 : 1 + HEAD_DIM]


LAYOUTS = ("rows of a pool", "some heads of a pool", "positions before heads", "cells with gaps")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_a_large_step_gives_the_attention_of_torch_over_any_layout(layout: str) -> None:
    assert BATCH * HEADS * POSITIONS >= MIN_CELLS
    query, mask = _inputs(torch.float32)
    keys, values = _buffer(layout, 1), _buffer(layout, 2)
    exact = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(StepAttention().attend(query, keys, values, mask, 0.3), exact, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_layers_whose_buffers_lie_differently_each_get_their_own_attention() -> None:
    query, mask = _inputs(torch.float32)
    attention = StepAttention()
    for seed, layout in enumerate([*LAYOUTS, *LAYOUTS]):
        keys, values = _buffer(layout, seed), _buffer(layout, seed + 50)
        exact = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3)
        torch.testing.assert_close(attention.attend(query, keys, values, mask, 0.3), exact, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_query_that_is_a_view_of_a_larger_tensor_is_read_as_it_is() -> None:
    query, mask = _inputs(torch.float32)
    wide = torch.zeros(BATCH, HEADS + 2, GROUP, HEAD_DIM)
    wide[:, :HEADS] = query
    keys, values = _buffer(LAYOUTS[0], 1), _buffer(LAYOUTS[0], 2)
    expected = StepAttention().attend(query, keys, values, mask, 0.3)
    assert torch.equal(StepAttention().attend(wide[:, :HEADS], keys, values, mask, 0.3), expected)


@torch.inference_mode()
def test_a_large_step_in_bfloat16_is_near_the_exact_attention() -> None:
    query, mask = _inputs(torch.bfloat16)
    keys, values = _buffer(LAYOUTS[0], 1, torch.bfloat16), _buffer(LAYOUTS[0], 2, torch.bfloat16)
    exact = F.scaled_dot_product_attention(query.float(), keys.float(), values.float(), attn_mask=mask, scale=0.3)
    out = StepAttention().attend(query, keys, values, mask, 0.3)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0.02)
