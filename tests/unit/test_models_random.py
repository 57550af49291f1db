"""Random models in the shape of published ones: their sizes, how they are made, that they run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dejavu.models import random_shapes
from dejavu.models.random_shapes import SHAPES, Shape
from dejavu.models.reference import generate_batch, load_reference
from dejavu.models.source import ModelSource, check, kinds, known_num_layers, resolve
from dejavu.models.spec import describe
from dejavu.models.tokenizer import TextCodec

SMALL = Shape(
    config_class="OPTConfig",
    num_layers=2,
    sizes={
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
    },
)


def no_progress(description: str, done: int, total: int, unit: str) -> None:
    """Nobody watches."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind that is made in a moment."""
    monkeypatch.setitem(SHAPES, "random-opt-125m", SMALL)  # type: ignore[arg-type]
    return "random-opt-125m"


@pytest.mark.parametrize(("kind", "millions"), [("random-opt-125m", 125.2), ("random-gpt2-124m", 124.4)])
def test_a_shape_has_as_many_parameters_as_the_published_model(kind: str, millions: float) -> None:
    from transformers import AutoModelForCausalLM

    config = random_shapes._config(SHAPES[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert known_num_layers(ModelSource(kind=kind)) == config.num_hidden_layers == 12


def test_every_shape_is_a_kind_that_passes_the_check() -> None:
    assert set(SHAPES) <= set(kinds())
    for kind in SHAPES:
        check(ModelSource(kind=kind))


def test_equal_seeds_give_equal_bytes_and_others_other_ones_in_half_the_size_of_float32(
    small: str, tmp_path: Path
) -> None:
    one, two = (resolve(ModelSource(kind=small, seed=3), tmp_path / name, no_progress) for name in ("a", "b"))
    other = resolve(ModelSource(kind=small, seed=4), tmp_path / "a", no_progress)
    weights = (one / "model.safetensors").read_bytes()
    assert weights == (two / "model.safetensors").read_bytes()
    assert weights != (other / "model.safetensors").read_bytes()
    assert describe(one).dtype == "bfloat16"
    spec = describe(one, "float32")
    assert (spec.num_layers, spec.vocab_size, spec.max_length) == (2, 1000, 64)
    assert len(weights) < 0.6 * sum(tensor.numel() * 4 for tensor in load_reference(one).state_dict().values())


def test_making_tells_how_many_bytes_are_made_up_to_all_of_them(small: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    resolve(ModelSource(kind=small), tmp_path, lambda description, done, total, unit: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] > 0


def test_a_random_model_answers_differently_to_different_prompts_and_decodes_tokens_beyond_its_tokenizer(
    small: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    folder = resolve(ModelSource(kind=small), tmp_path, no_progress)
    model = load_reference(folder)
    one, two = (generate_batch(model, [prompt], 8, ignore_eos=True)[0] for prompt in ([1, 2, 3], [700, 5]))
    assert list(one) != list(two)
    assert len(set(one)) > 2
    assert isinstance(TextCodec(folder).decode([104, 105, 999]), str)
