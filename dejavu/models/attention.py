"""Attention for right-padded prompts and for steps over views of long buffers, registered with transformers.

Shape legend in ``cache.py``; Q query heads, G of them for each kv head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ATTENTION_NAME = "dejavu"


def register() -> None:
    """transformers' layers know our attention under ``ATTENTION_NAME``. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention output [B, T, Q, D] of query [B, Q, T, D] over key and value [B, H, S, D].

    Without a mask the pass is a fresh prompt (S = T, causal). A mask [B or 1, 1, T, S] is True where to attend, or
    a float one to add to the scores.
    """
    batch, num_heads, num_positions, head_dim = query.shape
    if attention_mask is None or num_positions > 1:
        return attend_prompt(query, key, value, attention_mask, scaling).transpose(1, 2), None
    num_kv_heads = key.shape[1]
    grouped = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = attend_step(grouped, key, value, attention_mask, scaling)
    return out.reshape(batch, 1, num_heads, head_dim), None


def attend_prompt(query_BQTD: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention output [B, Q, T, D] of fresh prompts over their own keys and values [B, H, T, D]; no mask is causal."""
    group = query_BQTD.shape[1] // keys.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(
            query_BQTD, keys, values, is_causal=True, scale=scaling, enable_gqa=group > 1
        )
    # A masked prompt with grouped heads would leave the fused kernels on CUDA; here K and V are short.
    keys, values = _repeat(keys, group), _repeat(values, group)
    return F.scaled_dot_product_attention(query_BQTD, keys, values, attn_mask=mask, scale=scaling)


def attend_step(query_BHGD: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention output [B, H, G, D] of one position's G query heads of each kv head over [B, H, S, D].

    The heads of a group stand in for positions: no copy of K and V, whose repetition costs several times the
    attention itself (bf16 most of all).
    """
    return F.scaled_dot_product_attention(query_BHGD, keys, values, attn_mask=mask, scale=scaling)


def _repeat(states_BHSD: Tensor, group: int) -> Tensor:
    return states_BHSD if group == 1 else states_BHSD.repeat_interleave(group, dim=1)


def prompt_mask(num_positions: int, window: int | None, device: torch.device) -> Tensor | None:
    """Bool mask [1, 1, T, T] of a fresh prompt; None where plain causal attention is all there is to it."""
    if window is None or num_positions < window:
        return None
    positions = torch.arange(num_positions, device=device)
    distance = positions[:, None] - positions[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


def step_mask(positions_B: Tensor, num_positions: int, window: int | None) -> Tensor:
    """Bool mask [B, 1, 1, S] of a step: a row attends to its own cells up to the one it writes."""
    cells = torch.arange(num_positions, device=positions_B.device)[None, :]
    mask = cells <= positions_B[:, None]
    if window is not None:
        mask &= cells > positions_B[:, None] - window
    return mask[:, None, None, :]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The float mask to add to attention scores: 0 where ``mask`` is True, the dtype's least number elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(dtype).min)


def causal_mask(num_positions: int, device: torch.device) -> Tensor:
    """Bool mask [1, 1, T, T], True on and below the diagonal."""
    return torch.ones(num_positions, num_positions, dtype=torch.bool, device=device).tril()[None, None]


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """BLOOM's slope of each head [H], float32 (arXiv 2108.12409)."""
    power = 2 ** math.floor(math.log2(num_heads))
    base = torch.tensor(2.0 ** -(2.0 ** -(math.log2(power) - 3)), device=device)
    slopes_H = base ** torch.arange(1, 1 + power, device=device)
    if power == num_heads:
        return slopes_H
    extra_base = torch.tensor(2.0 ** -(2.0 ** -(math.log2(2 * power) - 3)), device=device)
    extra = extra_base ** torch.arange(1, 1 + 2 * (num_heads - power), 2, device=device)
    return torch.cat([slopes_H, extra])


def alibi_bias(slopes_H: Tensor, batch: int, num_positions: int, dtype: torch.dtype) -> Tensor:
    """BLOOM's bias [B * H, 1, S]; right for rows of any length, since softmax does not see a shift."""
    cells = torch.arange(num_positions, device=slopes_H.device)
    return (slopes_H[:, None, None] * cells).repeat(batch, 1, 1).to(dtype)
