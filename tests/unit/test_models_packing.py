"""Packed linear layers compute what the plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dejavu.models.packing import PackedLinear, can_pack, held_bytes, pack, pack_linears

CPU = torch.device("cpu")


def _packable(dtype: torch.dtype) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip(f"this build of torch cannot pack {dtype} for oneDNN")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (33, 1, 64), (2, 70, 64)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_layer_gives_the_plain_product(dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool) -> None:
    _packable(dtype)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    inputs = torch.randn(*shape, generator=generator).to(dtype)
    exact = F.linear(inputs.float(), weight.float(), None if bias is None else bias.float())
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(PackedLinear(weight, bias)(inputs).float(), exact, atol=tolerance, rtol=0.02)


def test_a_packed_layer_takes_inputs_that_are_not_contiguous() -> None:
    _packable(torch.float32)
    weight, inputs = torch.randn(96, 64), torch.randn(64, 5).t()
    torch.testing.assert_close(PackedLinear(weight, None)(inputs), F.linear(inputs, weight), atol=1e-4, rtol=1e-4)


def test_all_linear_layers_of_a_module_are_packed_and_their_plain_weights_are_gone() -> None:
    _packable(torch.float32)
    from transformers.pytorch_utils import Conv1D

    module = nn.Sequential(nn.Linear(8, 16), nn.Sequential(Conv1D(4, 16), nn.LayerNorm(4)))
    inputs = torch.randn(3, 8)
    expected = module(inputs)
    total = held_bytes([module])
    pack_linears(module)
    torch.testing.assert_close(module(inputs), expected, atol=1e-5, rtol=1e-5)
    assert sum(parameter.numel() for parameter in module.parameters()) == 8
    assert held_bytes([module]) == total


def test_packing_is_declined_for_other_devices_and_dtypes() -> None:
    assert not can_pack(torch.float32, torch.device("meta"))
    assert not can_pack(torch.float16, CPU)


def test_packing_is_declined_when_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("_reorder_linear_weight")

    monkeypatch.setattr(f"{pack.__module__}.pack", missing)
    assert not can_pack(torch.float32, CPU)
