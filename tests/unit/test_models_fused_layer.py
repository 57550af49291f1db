"""Fused layers compute what transformers' layers do, and are used where they can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dejavu.kv.layout import LayerRange
from dejavu.models import stage_parts
from dejavu.models.attention import ATTENTION_NAME, additive, prompt_mask, register, step_mask
from dejavu.models.cache import SinkCache
from dejavu.models.fused_layer import FusedLayer, FusedPass, can_fuse
from dejavu.models.packing import can_pack, held_bytes
from dejavu.models.spec import describe
from dejavu.models.stage import StageModel
from dejavu.models.tiny import make_tiny

POSITIONS = 24
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"head_dim": 8, "num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
)
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="this build of torch cannot pack weights for oneDNN"
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class OneLayerSink:
    """Buffers of one layer; ``positions`` is None for a prompt."""

    def __init__(self, batch: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(batch, num_kv_heads, POSITIONS, head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.positions: list[int] | None = None

    def update(self, layer_index: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        assert layer_index == 1
        if self.positions is None:
            self.keys[:, :, : keys_BHTD.shape[2]] = keys_BHTD
            self.values[:, :, : keys_BHTD.shape[2]] = values_BHTD
            return keys_BHTD, values_BHTD
        rows = torch.arange(len(self.positions))
        self.keys[rows, :, self.positions] = keys_BHTD[:, :, 0]
        self.values[rows, :, self.positions] = values_BHTD[:, :, 0]
        return self.keys, self.values


class Pair:
    """A layer of transformers with random weights and biases, and the fused one of the same weights."""

    def __init__(self, family: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        register()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.config = AutoConfig.for_model(
            family, **{**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 16, **changes}
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1))
        self.dtype = dtype
        self.plain = model.model.layers[1]
        self.rotary = model.model.rotary_emb
        self.fused = FusedLayer(self.plain)

    def sinks(self, batch: int) -> tuple[OneLayerSink, OneLayerSink]:
        one, two = (
            OneLayerSink(batch, self.config.num_key_value_heads, self.config.head_dim, self.dtype) for _ in range(2)
        )
        return one, two

    @torch.inference_mode()
    def run(
        self, hidden: Tensor, positions_BT: Tensor, mask: Tensor | None, sinks: tuple[OneLayerSink, OneLayerSink]
    ) -> tuple[Tensor, Tensor]:
        """What the plain layer gives and what the fused one gives."""
        num_positions = int(positions_BT.max()) + 1
        rotary = self.rotary(hidden, positions_BT)
        plain = self.plain(
            hidden, attention_mask=mask, cache=SinkCache(sinks[0], num_positions), position_embeddings=rotary
        )
        return plain, self.fused.run(hidden, FusedPass.of(rotary, sinks[1], num_positions), mask)


def check_near(fused: Tensor, plain: Tensor, tolerance: float) -> None:
    """Each number in float32; in bfloat16, where single ones may round apart far, all of them together."""
    if fused.dtype == torch.float32:
        torch.testing.assert_close(fused, plain, atol=tolerance, rtol=tolerance)
    assert (fused.float() - plain.float()).norm() <= tolerance * plain.float().norm()


def check_prompt_and_steps(pair: Pair, batch: int, window: int | None, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sinks = pair.sinks(batch)
    hidden = torch.randn(batch, 12, 32, generator=generator).to(pair.dtype)
    before = hidden.clone()
    mask = prompt_mask(12, window, torch.device("cpu"))
    plain, fused = pair.run(hidden, torch.arange(12)[None, :], mask, sinks)
    check_near(fused, plain, tolerance)
    assert torch.equal(hidden, before), "the layer wrote to its input"
    for step_index in range(3):
        positions = [5 + row % 7 + step_index for row in range(batch)]
        for sink in sinks:
            sink.positions = positions
        position_B = torch.tensor(positions)
        mask = additive(step_mask(position_B, max(positions) + 1, window), torch.float32)
        hidden = torch.randn(batch, 1, 32, generator=generator).to(pair.dtype)
        plain, fused = pair.run(hidden, position_B[:, None], mask, sinks)
        check_near(fused, plain, tolerance)
    check_near(sinks[1].keys, sinks[0].keys, tolerance)
    check_near(sinks[1].values, sinks[0].values, tolerance)


@needs_packing
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
@pytest.mark.parametrize("window", [None, 4])
def test_a_fused_layer_gives_the_hidden_states_and_cells_of_the_plain_one(
    family: str, changes: dict[str, Any], window: int | None
) -> None:
    check_prompt_and_steps(Pair(family, changes, torch.float32), 3, window, 2e-5)


@needs_packing
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}])
def test_a_fused_layer_agrees_where_a_step_is_large_enough_for_its_own_attention(changes: dict[str, Any]) -> None:
    batch = 2500 // (changes.get("num_key_value_heads", 2) * 12) + 1
    check_prompt_and_steps(Pair("llama", changes, torch.float32), batch, None, 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_layer_in_bfloat16_is_as_near_to_the_plain_one_as_rounding_lets_it(family: str) -> None:
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this build of torch cannot pack bfloat16 weights for oneDNN")
    check_prompt_and_steps(Pair(family, {}, torch.bfloat16), 3, None, 0.02)


@needs_packing
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_fused_layer_holds_the_bytes_of_the_plain_one(family: str, changes: dict[str, Any]) -> None:
    pair = Pair(family, changes, torch.float32)
    assert held_bytes([pair.fused]) == held_bytes([pair.plain])


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_llama_like_families_run_fused_layers(tmp_path: Path, family: str) -> None:
    folder = make_tiny(family, tmp_path, num_layers=2)
    parts = _layers_of(folder)
    assert [type(part) for part in parts] == [FusedLayer, FusedLayer]


@needs_packing
def test_stages_of_other_families_run_their_own_layers(tmp_path: Path) -> None:
    assert not any(isinstance(part, FusedLayer) for part in _layers_of(make_tiny("gpt2", tmp_path, num_layers=2)))


def _layers_of(folder: Path) -> list[nn.Module]:
    spec = describe(folder)
    layers = LayerRange(0, spec.num_layers)
    config = stage_parts.families.read_config(folder)
    parts = stage_parts.load_parts(spec, layers, torch.device("cpu"), config)
    return [parts[stage_parts.layer_part(layer)] for layer in layers.indices]


@needs_packing
def test_a_layer_with_another_activation_is_not_fused() -> None:
    pair = Pair("llama", {"hidden_act": "gelu"}, torch.float32)
    assert not can_fuse(pair.plain, pair.config)


@needs_packing
def test_a_layer_with_a_part_that_fused_ones_lack_is_not_fused() -> None:
    pair = Pair("llama", {}, torch.float32)
    assert can_fuse(pair.plain, pair.config)
    pair.plain.self_attn.add_module("gate", nn.Linear(4, 4))
    assert not can_fuse(pair.plain, pair.config)


@needs_packing
def test_a_layer_with_a_bias_on_one_of_the_fused_projections_alone_is_not_fused() -> None:
    pair = Pair("llama", {}, torch.float32)
    pair.plain.self_attn.k_proj.bias = nn.Parameter(torch.zeros(16))
    assert not can_fuse(pair.plain, pair.config)


@needs_packing
def test_a_stage_whose_layers_cannot_be_fused_gives_the_logits_of_one_whose_layers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = describe(make_tiny("llama", tmp_path, num_layers=2), "float32")
    layers = LayerRange(0, 2)
    fused = StageModel.load(spec, layers)
    monkeypatch.setattr(stage_parts, "can_fuse", lambda layer, config: False)
    plain = StageModel.load(spec, layers)
    assert fused.weight_bytes == plain.weight_bytes

    class Nowhere:
        def update(self, layer_index: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
            return keys_BHTD, values_BHTD

    tokens = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(
        fused.prompt(tokens, [10, 4], Nowhere()), plain.prompt(tokens, [10, 4], Nowhere()), atol=1e-4, rtol=1e-4
    )
