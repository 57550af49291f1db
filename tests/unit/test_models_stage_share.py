"""What a stage does of a pass through the whole model."""

from __future__ import annotations

import msgspec
import pytest

from dejavu.kv.layout import LayerRange
from dejavu.models.stage_share import StageShare

from harness.plans import made_up_spec


def test_the_stages_of_a_pipeline_do_the_whole_work_and_the_last_one_the_heads() -> None:
    spec = msgspec.structs.replace(made_up_spec(), num_layers=10, layer_parameters=100, head_parameters=250)
    first, last = spec.share(LayerRange(0, 6)), spec.share(LayerRange(6, 10))
    assert (first.layers, last.layers) == (0.6, 0.4)
    assert (first.weights, last.weights) == (pytest.approx(600 / 1250), pytest.approx(650 / 1250))


def test_a_step_reads_weights_by_their_share_and_kv_by_the_layers() -> None:
    share = StageShare(layers=0.4, weights=0.5)
    assert share.step_s(1.0, 1.0) == pytest.approx(0.5)
    assert share.step_s(3.0, 1.0) == pytest.approx(0.5 + 2 * 0.4)
    assert share.step_s(1.0, 2.0) == pytest.approx(0.5)


def test_a_model_of_which_no_parameter_is_counted_has_shares_all_the_same() -> None:
    spec = msgspec.structs.replace(made_up_spec(), num_layers=4, layer_parameters=0, head_parameters=0)
    assert spec.share(LayerRange(0, 1)) == StageShare(layers=0.25, weights=0.25)
