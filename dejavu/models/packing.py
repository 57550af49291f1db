"""Linear layers whose weights were reordered once for oneDNN: several times faster at small batches on a CPU.

The operators are private ones of torch, so they are used here alone; where they are missing or give wrong
numbers, layers stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_log = logging.getLogger(__name__)
_ROWS_HINT = 8
"""Rows that the packing is tuned for; one packing serves 1 to 4096."""
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with the weight in oneDNN's own order; the plain weight is gone."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.numel() * weight.element_size() + (0 if bias is None else bias.nbytes)
        self._packed = pack(weight)
        self._bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return apply_packed(inputs, self._packed, self._bias)


def pack(weight: Tensor) -> Tensor:
    """An opaque tensor with the values of ``weight`` [out, in]."""
    with torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
    return packed


def apply_packed(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """The linear map of a packed weight."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True when packing works here for ``dtype``: the operators exist and reproduce a small product."""
    if device.type != "cpu" or dtype not in _CHECK_TOLERANCE or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    inputs = torch.randn(5, 64, generator=generator).to(dtype)
    try:
        out = apply_packed(inputs, pack(weight), None)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        _log.info("weights are not packed for oneDNN (%s): %s", dtype, error)
        return False
    return bool((out.float() - F.linear(inputs.float(), weight.float())).abs().max() < _CHECK_TOLERANCE[dtype])


def pack_linears(module: nn.Module) -> nn.Module:
    """Every linear layer in ``module`` (or itself) is packed; mutates it and returns what stands in its place."""
    if (linear := _weight_and_bias(module)) is not None:
        return PackedLinear(*linear)
    for parent, name, child in list(_linears(module)):
        setattr(parent, name, pack_linears(child))
    return module


def _linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in module.modules():
        for name, child in parent.named_children():
            if _weight_and_bias(child) is not None:
                yield parent, name, child


def _weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """The weight [out, in] and bias of a linear layer; None for any other module."""
    if isinstance(module, nn.Linear):
        return module.weight.detach(), None if module.bias is None else module.bias.detach()
    if type(module).__name__ == "Conv1D" and isinstance(weight := getattr(module, "weight", None), Tensor):
        # GPT-2 keeps its linear weights transposed, [in, out].
        return weight.detach().t().contiguous(), module.bias.detach()  # type: ignore[operator]
    return None


def held_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of weights that ``modules`` hold, packed ones included, shared ones once."""
    parts = [part for module in modules for part in module.modules()]
    plain = {parameter.data_ptr(): parameter.nbytes for part in parts for parameter in part.parameters(recurse=False)}
    return sum(plain.values()) + sum(part.weight_bytes for part in parts if isinstance(part, PackedLinear))
