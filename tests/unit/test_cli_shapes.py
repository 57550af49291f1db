"""Shapes that cannot be are refused with both numbers, before a model is read (field report B14)."""

from __future__ import annotations

import pytest

from dejavu.errors import ConfigError
from dejavu.workflows.preparation import check_shape_early

from harness.cluster_kit import configured


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_shape_early(configured("model=tiny-llama", "model.num_layers=4", *overrides))
    message = str(refused.value)
    assert len(message.splitlines()) <= 3
    return message


@pytest.mark.parametrize("key", ["strategy.split.prompt", "strategy.split.token"])
def test_more_stages_than_layers_are_refused_with_both_numbers(key: str) -> None:
    message = refusal(f"{key}=5")
    assert f"{key}=5: 5 stages" in message
    assert "4 layers" in message


@pytest.mark.parametrize("key", ["strategy.split.prompt", "strategy.split.token"])
@pytest.mark.parametrize("depth", [0, -1])
def test_a_pipeline_without_stages_is_refused(key: str, depth: int) -> None:
    assert f"{key}={depth}" in refusal(f"{key}={depth}")


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [("[[0,2],[3,4]]", "[2, b]"), ("[[0,2]]", "1 ranges"), ("[[0,2],[2,3]]", "ends at layer 3")],
)
def test_explicit_ranges_that_do_not_cover_the_model_are_refused(ranges: str, expected: str) -> None:
    assert expected in refusal("strategy.split.token=2", f"strategy.layers.token={ranges}")


def test_fewer_workers_than_stages_are_refused_with_both_numbers() -> None:
    message = refusal("strategy.split.prompt=2", "strategy.split.token=2", "cluster.num_workers=3")
    assert "4" in message
    assert "3" in message
