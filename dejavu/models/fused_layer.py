"""The decoder layer of the Llama-like families in few operators, for a CPU.

A step through transformers' own layer spends half a millisecond on dispatch, whatever the model's size.

Shape legend in ``cache.py``; Q query heads, N = Q + 2 H heads out of the fused projection, I width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dejavu.models.attention import attend_prompt
from dejavu.models.cache import KvSink
from dejavu.models.packing import PackedLinear
from dejavu.models.step_attention import StepAttention

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPass:
    """What all fused layers share in one pass."""

    sink: KvSink
    num_positions: int
    """S: cells that the pass's mask covers."""
    cos_BT1D: Tensor
    signed_sin_BT1D: Tensor
    """Sine with its first half negated: the sign of the rotated half, taken once instead of at every layer."""
    attention: StepAttention

    @classmethod
    def of(cls, rotary: tuple[Tensor, Tensor], sink: KvSink, num_positions: int) -> FusedPass:
        """A pass with transformers' cosine and sine, [B or 1, T, D] each."""
        cos_BTD, sin_BTD = rotary
        half = sin_BTD.shape[-1] // 2
        signed = torch.cat((-sin_BTD[..., :half], sin_BTD[..., half:]), dim=-1)
        return cls(
            sink=sink,
            num_positions=num_positions,
            cos_BT1D=cos_BTD.unsqueeze(2),
            signed_sin_BT1D=signed.unsqueeze(2),
            attention=StepAttention(),
        )

    def rotate(self, states: Tensor) -> Tensor:
        """Queries or keys [B, T, heads, D] with their positions in; a new tensor."""
        rolled = states.roll(states.shape[-1] // 2, -1)
        return (states * self.cos_BT1D).addcmul_(rolled, self.signed_sin_BT1D)


class RmsNorm(nn.Module):
    """transformers' RMSNorm: normalised in float32, then weighted in the model's dtype."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach(), requires_grad=False)
        self._epsilon: float = norm.variance_epsilon
        # Looking up a module's parameter costs as much as a small operator.
        self._weight = self.weight.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., size of the weight], a new tensor of the same shape and dtype."""
        return _normalised(inputs, self._epsilon).mul_(self._weight)


class HeadNorms(nn.Module):
    """Qwen3's RMSNorms of each query head and of each key head, both at once."""

    def __init__(self, query_norm: Any, key_norm: Any, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.query_weight = nn.Parameter(query_norm.weight.detach(), requires_grad=False)
        self.key_weight = nn.Parameter(key_norm.weight.detach(), requires_grad=False)
        self._epsilon: float = query_norm.variance_epsilon
        # One row a head: a few kilobytes more than the weights that are counted.
        rows = [self.query_weight.detach()] * num_heads + [self.key_weight.detach()] * num_kv_heads
        self._weights = torch.stack(rows)

    def forward(self, states: Tensor) -> Tensor:
        """Queries and keys [B, T, Q + H, D], new ones."""
        return _normalised(states, self._epsilon).mul_(self._weights)


def _normalised(inputs: Tensor, epsilon: float) -> Tensor:
    wide = inputs.float()
    scale = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return (wide * scale).to(inputs.dtype)


class FusedLayer(nn.Module):
    """A decoder layer with one packed projection for q, k and v and one for gate and up.

    A module only so that its weights are counted: layers are run by ``run``, and parts by their ``forward``, since
    calling a module costs more than it does.
    """

    def __init__(self, layer: Any) -> None:
        """Has its own copies of the weights of transformers' ``layer``, for which ``can_fuse`` holds."""
        super().__init__()
        source, mlp = layer.self_attn, layer.mlp
        self.layer_index: int = source.layer_idx
        self._scaling: float = source.scaling
        self._head_dim: int = source.head_dim
        self._num_heads: int = source.q_proj.out_features // self._head_dim
        self._num_kv_heads: int = source.k_proj.out_features // self._head_dim
        self.attention_norm = RmsNorm(layer.input_layernorm)
        self.qkv = _fused(source.q_proj, source.k_proj, source.v_proj)
        self.head_norms: HeadNorms | None = None
        if hasattr(source, "q_norm"):
            self.head_norms = HeadNorms(source.q_norm, source.k_norm, self._num_heads, self._num_kv_heads)
        self.out = _fused(source.o_proj)
        self.mlp_norm = RmsNorm(layer.post_attention_layernorm)
        self.gate_up = _fused(mlp.gate_proj, mlp.up_proj)
        self.down = _fused(mlp.down_proj)

    def run(self, hidden_BTE: Tensor, one_pass: FusedPass, mask: Tensor | None) -> Tensor:
        """Hidden states [B, T, E] after the layer, a new tensor; the sink has its cells. ``mask``: see ``attend``."""
        normed_BTE = self.attention_norm.forward(hidden_BTE)
        hidden_BTE = self.out.forward(self._attend(normed_BTE, one_pass, mask)).add_(hidden_BTE)
        gate_BTI, up_BTI = self.gate_up.forward(self.mlp_norm.forward(hidden_BTE)).chunk(2, -1)
        return self.down.forward(F.silu(gate_BTI).mul_(up_BTI)).add_(hidden_BTE)

    def _attend(self, normed_BTE: Tensor, one_pass: FusedPass, mask: Tensor | None) -> Tensor:
        """All heads' attention [B, T, Q * D]."""
        batch, num_positions, _ = normed_BTE.shape
        num_heads, num_turned = self._num_heads, self._num_heads + self._num_kv_heads
        states_BTND = self.qkv.forward(normed_BTE).view(batch, num_positions, -1, self._head_dim)
        turned = states_BTND[:, :, :num_turned]
        if self.head_norms is not None:
            turned = self.head_norms.forward(turned)
        turned = one_pass.rotate(turned)
        query_BTQD, keys_BTHD, values_BTHD = (
            turned[:, :, :num_heads],
            turned[:, :, num_heads:],
            states_BTND[:, :, num_turned:],
        )
        if mask is None or num_positions > 1:
            out = self._attend_prompt(query_BTQD, keys_BTHD, values_BTHD, one_pass, mask)
        else:
            out = self._attend_step(query_BTQD, keys_BTHD, values_BTHD, one_pass, mask)
        return out.reshape(batch, num_positions, -1)

    def _attend_prompt(
        self, query_BTQD: Tensor, keys_BTHD: Tensor, values_BTHD: Tensor, one_pass: FusedPass, mask: Tensor | None
    ) -> Tensor:
        """[B, T, Q, D]."""
        # Whoever keeps a view keeps all heads' memory; and the kernel is faster on contiguous cells.
        keys, values = keys_BTHD.transpose(1, 2).contiguous(), values_BTHD.transpose(1, 2).contiguous()
        keys, values = one_pass.sink.update(self.layer_index, keys, values)
        return attend_prompt(query_BTQD.transpose(1, 2), keys, values, mask, self._scaling).transpose(1, 2)

    def _attend_step(
        self, query_BTQD: Tensor, keys_BTHD: Tensor, values_BTHD: Tensor, one_pass: FusedPass, mask: Tensor
    ) -> Tensor:
        """[B, H, G, D] for T = 1."""
        keys, values = one_pass.sink.update(self.layer_index, keys_BTHD.transpose(1, 2), values_BTHD.transpose(1, 2))
        keys, values = keys[:, :, : one_pass.num_positions], values[:, :, : one_pass.num_positions]
        query_BHGD = query_BTQD.view(len(query_BTQD), self._num_kv_heads, -1, self._head_dim)
        return one_pass.attention.attend(query_BHGD, keys, values, mask, self._scaling)


def can_fuse(layer: nn.Module, config: Any) -> bool:
    """True when ``layer`` of transformers is one that ``FusedLayer`` computes, down to the names of its parts."""
    if {name for name, _ in layer.named_children()} != _PARTS or config.hidden_act not in _ACTIVATIONS:
        return False
    source, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    parts = {name for name, _ in source.named_children()}
    if parts not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS):
        return False
    if {name for name, _ in mlp.named_children()} != _MLP_PARTS:
        return False
    return all(
        _alike([part.get_submodule(name) for name in names])
        for part, names in ((source, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj")))
    )


def _alike(linears: list[nn.Module]) -> bool:
    """True for plain linear layers that have biases all or none."""
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    return len({linear.bias is None for linear in linears}) == 1


def _fused(*linears: nn.Linear) -> PackedLinear:
    """One packed layer that gives all outputs side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return PackedLinear(weight, torch.cat(biases) if biases else None)
