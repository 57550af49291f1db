"""Stages of every family give the tokens of transformers' own ``generate``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dejavu.errors import ConfigError
from dejavu.kv.layout import LayerRange
from dejavu.models import stage_parts
from dejavu.models.families import FAMILIES
from dejavu.models.reference import generate_reference, load_reference
from dejavu.models.spec import ModelSpec, describe
from dejavu.models.stage import StageModel
from dejavu.models.tiny import make_tiny

LENGTHS = (1, 3, 17, 64)
NUM_NEW = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class DenseSink:
    """Buffers of a whole model for a few rows; ``rows`` says which of them a pass works on."""

    def __init__(self, spec: ModelSpec, num_rows: int) -> None:
        shape = (spec.num_layers, num_rows, spec.num_kv_heads, spec.max_length, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
        self.values = torch.zeros_like(self.keys)
        self.rows: slice = slice(0, num_rows)
        self.positions: list[int] | None = None
        self.calls: list[int] = []

    def update(self, layer_index: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append(layer_index)
        keys, values = self.keys[layer_index, self.rows], self.values[layer_index, self.rows]
        if self.positions is None:
            keys[:, :, : keys_BHTD.shape[2]] = keys_BHTD
            values[:, :, : keys_BHTD.shape[2]] = values_BHTD
            return keys_BHTD, values_BHTD
        rows = torch.arange(len(self.positions))
        keys[rows, :, self.positions] = keys_BHTD[:, :, 0]
        values[rows, :, self.positions] = values_BHTD[:, :, 0]
        return keys, values


class Pipeline:
    """All stages in one process over one sink."""

    def __init__(self, spec: ModelSpec, bounds: Sequence[int], num_rows: int) -> None:
        ranges = [LayerRange(start, stop) for start, stop in itertools.pairwise(bounds)]
        self.stages = [StageModel.load(spec, layers) for layers in ranges]
        self.sink = DenseSink(spec, num_rows)

    def prompt(self, prompts: Sequence[Sequence[int]], rows: slice) -> Tensor:
        self.sink.rows, self.sink.positions = rows, None
        longest = max(len(prompt) for prompt in prompts)
        # The padding is a real token, not zeros: whatever it is, it must not matter.
        values = torch.tensor([list(prompt) + [7] * (longest - len(prompt)) for prompt in prompts])
        for stage in self.stages:
            values = stage.prompt(values, [len(prompt) for prompt in prompts], self.sink)
        return values

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        self.sink.rows, self.sink.positions = slice(0, len(tokens)), list(positions)
        values = torch.tensor(tokens)[:, None]
        for stage in self.stages:
            values = stage.step(values, positions, self.sink)
        return values

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
        """Greedy tokens of all prompts in one microbatch."""
        logits_BV = self.prompt(prompts, slice(0, len(prompts)))
        answers = [[token] for token in logits_BV.argmax(-1).tolist()]
        for step_index in range(num_new - 1):
            positions = [len(prompt) + step_index for prompt in prompts]
            logits_BV = self.step([answer[-1] for answer in answers], positions)
            assert bool(logits_BV.isfinite().all())
            for answer, token in zip(answers, logits_BV.argmax(-1).tolist(), strict=True):
                answer.append(token)
        return answers


def ragged_prompts(seed: int = 1, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def check_tokens(folder: Path, bounds: Sequence[int], lengths: Sequence[int] = LENGTHS) -> None:
    spec = describe(folder, "float32", 128)
    prompts = ragged_prompts(lengths=lengths)
    expected = generate_reference(folder, "float32", prompts, NUM_NEW, ignore_eos=True)
    assert Pipeline(spec, bounds, len(prompts)).generate(prompts, NUM_NEW) == expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("bounds", [(0, 5), (0, 1, 6), (0, 3, 4, 7)], ids=["5-layers", "1+5", "3+1+3"])
def test_stages_of_any_depth_give_the_tokens_of_generate_for_ragged_prompts(
    models: Path, family: str, bounds: tuple[int, ...]
) -> None:
    check_tokens(make_tiny(family, models, num_layers=bounds[-1]), bounds)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_stages_with_fewer_kv_heads_give_the_tokens_of_generate(models: Path, family: str, num_kv_heads: int) -> None:
    check_tokens(make_tiny(family, models, num_layers=5, num_kv_heads=num_kv_heads), (0, 2, 5))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_stages_with_a_sliding_window_give_the_tokens_of_generate(models: Path, family: str) -> None:
    folder = make_tiny(family, models, num_layers=4, num_kv_heads=2, sliding_window=8)
    check_tokens(folder, (0, 1, 4))
    # One less than the window, the window, and a little more: where a mask begins to matter.
    check_tokens(folder, (0, 4), lengths=[7, 8])
    check_tokens(folder, (0, 4), lengths=[9, 12])


@pytest.mark.parametrize("family", ["opt", "qwen2"])
def test_stages_with_an_untied_head_give_the_tokens_of_generate(models: Path, family: str) -> None:
    check_tokens(make_tiny(family, models, num_layers=2, tied=False), (0, 1, 2))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_stages_without_packing_give_the_tokens_of_generate(
    models: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_parts, "can_pack", lambda dtype, device: False)
    folder = make_tiny(family, models, num_layers=5)
    check_tokens(folder, (0, 2, 5))
    check_tokens(folder, (0, 5))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "qwen3"])
def test_a_row_that_ended_and_was_replaced_leaves_the_others_as_they_were(models: Path, family: str) -> None:
    folder = make_tiny(family, models, num_layers=5)
    old, new = ragged_prompts(), ragged_prompts(seed=2, lengths=[9])[0]
    expected = generate_reference(folder, "float32", [*old, new], NUM_NEW, ignore_eos=True)
    pipeline = Pipeline(describe(folder, "float32"), (0, 2, 5), len(old))
    prompts = list(old)
    answers = [[token] for token in pipeline.prompt(old, slice(0, 4)).argmax(-1).tolist()]
    finished: list[int] = []
    for step_index in range(2 * NUM_NEW):
        if step_index == 3:
            finished, prompts[3] = answers[3], new
            answers[3] = pipeline.prompt([new], slice(3, 4)).argmax(-1).tolist()
        positions = [len(prompt) + len(answer) - 1 for prompt, answer in zip(prompts, answers, strict=True)]
        tokens = pipeline.step([answer[-1] for answer in answers], positions).argmax(-1).tolist()
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
    assert finished == expected[3][: len(finished)]
    assert [answer[:NUM_NEW] for answer in answers] == [*expected[:3], expected[4]]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_kept_keys_and_values_equal_those_of_the_reference_cache(models: Path, family: str) -> None:
    folder = make_tiny(family, models, num_layers=5)
    prompts = ragged_prompts(lengths=[17, 5])
    pipeline = Pipeline(describe(folder, "float32"), (0, 2, 5), 2)
    pipeline.prompt(prompts, slice(0, 2))
    assert pipeline.sink.calls == list(range(5))
    with torch.inference_mode():
        cache = load_reference(folder)(torch.tensor([prompts[1]]), use_cache=True).cache
    for layer in range(5):
        torch.testing.assert_close(pipeline.sink.keys[layer, 1:, :, :5], cache.layers[layer].keys, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(
            pipeline.sink.values[layer, 1:, :, :5], cache.layers[layer].values, atol=2e-4, rtol=1e-3
        )


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_dtypes_give_logits_near_those_of_the_reference(models: Path, family: str, dtype: str) -> None:
    folder = make_tiny(family, models, num_layers=5)
    prompts = ragged_prompts()
    pipeline = Pipeline(describe(folder, dtype), (0, 2, 5), len(prompts))
    logits_BV = pipeline.prompt(prompts, slice(0, 4))
    with torch.inference_mode():
        exact = [load_reference(folder)(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
        short = [load_reference(folder, dtype)(torch.tensor([prompt])).logits[0, -1].float() for prompt in prompts]
    assert logits_BV.dtype == torch.float32
    ours = (logits_BV - torch.stack(exact)).norm()
    theirs = (torch.stack(short) - torch.stack(exact)).norm()
    # Both round, in different places: ours may not be further from the exact logits than that.
    assert ours < 2.5 * theirs


def test_a_stage_holds_the_bytes_that_the_spec_foretells(models: Path) -> None:
    for family in FAMILIES:
        spec = describe(make_tiny(family, models, num_layers=5), "bfloat16")
        for layers in (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 5), LayerRange(0, 5)):
            stage = StageModel.load(spec, layers)
            assert stage.weight_bytes == spec.weight_bytes(layers, stage.first, stage.last), (family, layers)


def test_a_middle_stage_reads_no_tensor_but_its_own(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = stage_parts.Checkpoint.load

    def recorded(checkpoint: stage_parts.Checkpoint, name: str) -> Tensor:
        read.append(name)
        return real(checkpoint, name)

    monkeypatch.setattr(stage_parts.Checkpoint, "load", recorded)
    StageModel.load(describe(make_tiny("llama", models, num_layers=5)), LayerRange(2, 4))
    assert read
    assert all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in read)


def test_more_layers_than_the_model_has_are_refused(models: Path) -> None:
    spec = describe(make_tiny("llama", models, num_layers=5))
    with pytest.raises(ConfigError, match=r"\[3, 6\) of a model with 5 layers"):
        StageModel.load(spec, LayerRange(3, 6))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 5), (0, 1, 4, 5)], ids=str)
def test_a_part_of_a_loaded_model_computes_exactly_what_a_stage_loaded_alone_does(
    models: Path, family: str, bounds: Sequence[int]
) -> None:
    spec = describe(make_tiny(family, models, num_layers=5))
    alone, parts = Pipeline(spec, bounds, 2), Pipeline(spec, (), 2)
    whole = StageModel.load(spec, LayerRange(0, 5))
    parts.stages = [whole.part(LayerRange(start, stop)) for start, stop in itertools.pairwise(bounds)]
    prompts = ragged_prompts(lengths=(3, 7))
    rows = slice(0, 2)
    assert torch.equal(parts.prompt(prompts, rows), alone.prompt(prompts, rows))
    assert torch.equal(parts.step([5, 6], [3, 7]), alone.step([5, 6], [3, 7]))
    assert [(stage.first, stage.last) for stage in parts.stages] == [
        (stage.first, stage.last) for stage in alone.stages
    ]


def test_a_part_holds_no_weights_of_its_own(models: Path) -> None:
    whole = StageModel.load(describe(make_tiny("llama", models, num_layers=5)), LayerRange(0, 5))
    assert whole.part(LayerRange(1, 3)).weight_bytes == whole.weight_bytes


def test_layers_that_are_not_all_here_are_no_part(models: Path) -> None:
    stage = StageModel.load(describe(make_tiny("llama", models, num_layers=5)), LayerRange(1, 4))
    for layers in (LayerRange(0, 2), LayerRange(3, 5)):
        with pytest.raises(ConfigError, match=r"not all among \[1, 4\)"):
            stage.part(layers)
