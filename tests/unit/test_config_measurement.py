"""Declarations of a measurement that cannot be made are refused before anything starts, with the remedy."""

from __future__ import annotations

import pytest

from dejavu.config import Config
from dejavu.config.strategy import Streaming, StreamTo
from dejavu.errors import ConfigError

from harness.cluster_kit import configured


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        configured(*overrides)
    message = str(refused.value)
    assert len(message.splitlines()) <= 3
    return message


def test_fig11_declares_every_level_to_memory_and_disk_for_one_batch_in_one_microbatch() -> None:
    config = configured("experiment=fig11")
    measurement, microbatch = config.measurement, config.strategy.microbatch
    assert measurement.levels == list(Streaming)
    assert measurement.destinations == list(StreamTo)
    assert (measurement.batches, microbatch.prompt, microbatch.token, microbatch.prompt_tokens) == ([4], 4, 4, None)
    assert (config.workload.prompt_tokens, config.workload.max_tokens, config.workload.ignore_eos) == (500, 500, True)


def test_fig27_declares_three_models_and_batch_sizes_at_two_levels() -> None:
    measurement = configured("experiment=fig27").measurement
    assert len(measurement.models) == 3
    assert measurement.batches == [1, 4, 8]
    assert measurement.levels == [Streaming.off, Streaming.full]


def test_the_batch_of_an_experiment_follows_the_number_of_requests() -> None:
    config = configured("experiment=fig11", "workload.num_requests=2")
    assert (config.measurement.batches, config.strategy.microbatch.token) == ([2], 2)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("measurement.levels=[naive,full]", "lacks off"),
        ("measurement.levels=[]", "name at least one"),
        ("measurement.levels=[off,full,full]", "names one twice"),
        ("measurement.models=[tiny-ot]", "did you mean 'tiny-opt'"),
        ("measurement.batches=[0]", "at least 1 row"),
        ("measurement.batches=[5]", "raise workload.num_requests"),
        ("measurement.batches=[1,2]", "fig27 takes several"),
        ("measurement.repeats=0", "at least 1 round"),
        ("model=tiny-llama", "add measurement.models=[tiny-llama]"),
        ("model.max_length=600", "prompt and new tokens are 1000"),
        ("workload.ignore_eos=false", "workload.ignore_eos=true"),
        ("workload.rate=2", "workload.rate=0"),
        ("workload.max_tokens=1", "at least 2"),
        ("strategy=disaggregated", "strategy=colocated"),
        ("strategy.stages=2", "strategy.stages=1"),
        ("fault.kill=[{worker: w0, step: 2}]", "fault is for workflow=generate"),
        ("strategy.stream_to=disk", "measurement.destinations decides"),
        ("strategy.scheduling=row", "strategy.scheduling=microbatch"),
        ("strategy.microbatch.prompt=2", "at least 4 rows"),
        ("strategy.microbatch.prompt_tokens=512", ".prompt_tokens=null"),
    ],
)
def test_what_would_not_be_measured_as_declared_is_refused(override: str, words: str) -> None:
    assert words in refusal("experiment=fig11", override)


def test_a_measurement_of_other_prompts_than_random_ones_is_refused() -> None:
    message = refusal("experiment=fig11", "workload=chat", "workload.prompt_tokens=null")
    assert "workflow=streaming needs workload=synthetic" in message
    assert "experiment=fig11" in message


def test_fig27_needs_the_level_that_it_compares_with_off() -> None:
    assert "lacks full" in refusal("experiment=fig27", "measurement.levels=[off,naive]")


def test_keys_of_a_measurement_are_refused_where_nothing_is_measured() -> None:
    assert "is for workflow=streaming" in refusal("measurement.repeats=7")
    assert configured() == configured("measurement.repeats=3")
    assert isinstance(configured(), Config)


def test_the_sizes_of_a_random_model_are_its_own_and_its_seed_is_free() -> None:
    assert configured("model=random-opt-125m", "model.seed=5").model.seed == 5
    assert "is for the tiny models" in refusal("model=random-opt-125m", "model.num_layers=3")
