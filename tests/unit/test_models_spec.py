"""What is read of a model folder before anything is loaded, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dejavu.errors import ConfigError
from dejavu.kv.layout import LayerRange
from dejavu.models.families import FAMILIES
from dejavu.models.spec import ModelSpec, describe
from dejavu.models.stage import StageModel
from dejavu.models.tiny import VOCAB_SIZE, make_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spec-models")


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A tiny Llama that a test may spoil."""
    return Path(shutil.copytree(make_tiny("llama", models, num_layers=3, num_kv_heads=2), tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_described_model_states_its_shape(models: Path, family: str) -> None:
    spec = describe(make_tiny(family, models, num_layers=3), "bfloat16", 100)
    assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (family, 3, 4, 4)
    assert (spec.head_dim, spec.hidden_size, spec.vocab_size) == (16, 64, VOCAB_SIZE)
    assert (spec.dtype, spec.max_length, spec.eos_token_ids) == ("bfloat16", 100, (256,))
    assert spec.layout.position_bytes == 2 * 4 * 16 * 2


def test_a_spec_survives_json(folder: Path) -> None:
    spec = describe(folder)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


def test_a_length_left_open_is_the_models_own_limit_or_2048(folder: Path, models: Path) -> None:
    assert describe(folder).max_length == 128
    assert describe(make_tiny("bloom", models, num_layers=1)).max_length == 2048


def test_a_length_beyond_the_models_limit_is_refused_with_both_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match="129 is more than the 128 positions"):
        describe(folder, None, 129)


def test_an_unknown_dtype_is_refused_with_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        describe(folder, "bfloat")


def test_the_hash_is_that_of_the_files_and_not_of_the_folder(models: Path, folder: Path) -> None:
    same = describe(make_tiny("llama", models, num_layers=3, num_kv_heads=2))
    other = describe(make_tiny("llama", models, num_layers=3, num_kv_heads=2, seed=1))
    assert describe(folder).model_hash == same.model_hash
    assert describe(folder, "bfloat16").model_hash == same.model_hash
    assert other.model_hash != same.model_hash
    change_config(folder, rms_norm_eps=1e-3)
    assert describe(folder).model_hash != same.model_hash


def test_eos_tokens_are_those_of_the_generation_config_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert describe(folder).eos_token_ids == (5, 6)
    (folder / "generation_config.json").unlink()
    assert describe(folder).eos_token_ids == (256,)


def test_an_unsupported_architecture_is_refused_with_the_supported_families(folder: Path) -> None:
    change_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError) as refused:
        describe(folder)
    assert "'mamba' (MambaForCausalLM)" in str(refused.value)
    assert "supported families: bloom, gpt2, llama, mistral, opt, qwen2, qwen3" in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 3


def test_a_quantized_model_is_refused(folder: Path) -> None:
    change_config(folder, quantization_config={"bits": 4})
    with pytest.raises(ConfigError, match="quantized"):
        describe(folder)


def test_more_layers_in_the_config_than_in_the_weights_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=4)
    with pytest.raises(ConfigError, match="llama with 4 layers, but the weights hold nothing of layer 3"):
        describe(folder)


def test_a_config_that_is_no_json_is_refused_with_its_name(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        describe(folder)


def test_weights_that_were_cut_short_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cut short"):
        describe(folder)


def test_weights_that_are_no_safetensors_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no header here")
    with pytest.raises(ConfigError, match="no safetensors file"):
        describe(folder)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(folder: Path) -> None:
    change_config(folder, intermediate_size=100)
    with pytest.raises(ConfigError, match=r"shape \(192, 64\), config.json asks for \(100, 64\)"):
        StageModel.load(describe(folder), LayerRange(0, 3))


def test_a_sharded_checkpoint_and_one_without_prefix_give_the_same_stage(folder: Path) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    expected = _first_hidden(folder, tokens)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(_first_hidden(folder, tokens), expected)
    sharded = describe(folder)

    (folder / "model.safetensors.index.json").unlink()
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    assert torch.equal(_first_hidden(folder, tokens), expected)
    assert describe(folder).head_parameters == sharded.head_parameters


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-7.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks part-7\.safetensors"):
        describe(folder)


class _Keep:
    def update(
        self, layer_index: int, keys_BHTD: torch.Tensor, values_BHTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return keys_BHTD, values_BHTD


def _first_hidden(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    return StageModel.load(describe(folder), LayerRange(0, 3)).prompt(tokens, [3], _Keep())
