"""A stage that waits instead of computing: its times under a virtual clock, its cells, and its tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dejavu.clock import VirtualClock
from dejavu.errors import ConfigError
from dejavu.kv.layout import LayerRange
from dejavu.models.modelled_stage import next_token
from dejavu.models.modelled_times import TimeTable
from dejavu.models.pace import Pace

from harness.plans import EOS, VOCAB_SIZE
from harness.rehearsing import NUM_LAYERS, Rehearsing, made_up_times, rehearsed_spec, stage_of

PROMPT = [7, 3, 41, 12, 9]
ALL = LayerRange(0, NUM_LAYERS)


class Seen:
    """A sink that answers with what it was given, for a step at every position, and notes when it was asked."""

    def __init__(self, clock: VirtualClock, num_positions: int | None = None) -> None:
        self._clock = clock
        self._num_positions = num_positions
        self.at_s: list[tuple[int, float]] = []
        self.shapes: set[tuple[int, ...]] = set()

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.at_s.append((layer, round(self._clock.monotonic(), 9)))
        self.shapes |= {tuple(keys.shape), tuple(values.shape)}
        wide = keys.expand(-1, -1, self._num_positions or keys.shape[2], -1)
        return wide, wide


def test_a_table_is_exact_at_its_points_and_linear_between_and_beyond_them() -> None:
    table = TimeTable(rows=(1, 3), tokens=(10.0, 20.0), seconds=((1.0, 2.0), (5.0, 8.0)))
    assert table.at(1, 10) == 1.0
    assert table.at(3, 20) == 8.0
    assert table.at(2, 15) == pytest.approx(4.0)
    assert table.at(3, 30) == pytest.approx(11.0)
    assert table.at(5, 10) == pytest.approx(9.0)
    assert table.at(1, 0) == 1.0


def test_a_prompt_takes_its_stages_share_of_the_time_and_hands_over_a_layer_at_a_time() -> None:
    clock = VirtualClock()
    seen = Seen(clock)
    stage = stage_of(rehearsed_spec(), LayerRange(0, 3), clock)
    hidden = stage.prompt(torch.tensor([[*PROMPT, 1], [5] * 6]), [5, 6], seen)
    # 0.6 s of one token and half as much more for five further ones; half of the layers.
    assert clock.monotonic() == pytest.approx(0.45)
    assert seen.at_s == [(0, 0.0), (1, 0.15), (2, 0.3)]
    assert seen.shapes == {(2, 2, 6, 1)}
    assert hidden.shape == (2, 6, 8)
    assert hidden.dtype == torch.float16


def test_a_step_takes_the_time_of_its_slice_as_a_computing_stage_does_and_the_scale_multiplies_it() -> None:
    for time_scale in (1.0, 0.1):
        clock = VirtualClock()
        stage = stage_of(rehearsed_spec(made_up_times(time_scale=time_scale)), ALL, clock)
        logits = stage.step(torch.tensor([[1], [0], [2]]), [4, 0, 9], Seen(clock, 10))
        assert clock.monotonic() == pytest.approx(0.18 * time_scale)
        assert logits.shape == (3, VOCAB_SIZE)


def test_work_that_was_there_before_the_last_pass_ended_begins_at_that_end() -> None:
    clock = VirtualClock()
    pace = Pace(clock)
    pace.end(pace.begin(1.0), 1.0)
    clock.advance(0.25)
    assert pace.begin(0.5) == 1.0
    pace.end(1.0, 0.5)
    assert clock.monotonic() == pytest.approx(1.5)


def test_a_stage_whose_host_was_away_for_long_catches_up_by_one_pass_at_most() -> None:
    clock = VirtualClock()
    pace = Pace(clock)
    clock.advance(7.0)
    assert pace.begin(0.5) == 6.5


def test_work_that_came_to_an_idle_stage_begins_when_it_came() -> None:
    clock = VirtualClock()
    pace = Pace(clock)
    pace.end(pace.begin(1.0), 1.0)
    clock.advance(3.0)
    pace.idle()
    began_s = pace.begin(1.0)
    pace.end(began_s, 1.0)
    assert (began_s, clock.monotonic()) == (4.0, 5.0)


def test_a_pass_that_ends_too_late_is_counted() -> None:
    clock = VirtualClock()
    pace = Pace(clock)
    pace.idle()
    began_s = pace.begin(1.0)
    clock.advance(1.5)
    pace.end(began_s, 1.0)
    assert (pace.num_passes, pace.planned_s, pace.late_s, pace.most_late_s) == (1, 1.0, 0.5, 0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tokens_are_the_same_however_the_layers_are_cut(dtype: str) -> None:
    spec = rehearsed_spec(dtype=dtype)
    whole = Rehearsing(spec, [0, 6]).generate(PROMPT, 12)
    assert Rehearsing(spec, [0, 2, 5, 6]).generate(PROMPT, 12) == whole
    assert len(set(whole)) > 3
    assert EOS not in whole


def test_a_row_that_is_recomputed_as_one_prompt_goes_on_with_the_same_tokens() -> None:
    spec = rehearsed_spec()
    made = Rehearsing(spec, [0, 3, 6]).generate(PROMPT, 12)
    assert Rehearsing(spec, [0, 4, 6]).generate(PROMPT + made[:5], 7) == made[5:]


def test_a_row_has_the_same_tokens_among_others_of_other_lengths() -> None:
    spec = rehearsed_spec()
    made = Rehearsing(spec, [0, 6]).generate(PROMPT, 3)
    together = Rehearsing(spec, [0, 6])
    first = together.prompt([[5] * 9, PROMPT])
    second = together.step(first, [9, 5])
    third = together.step(second, [10, 6])
    assert [first[1], second[1], third[1]] == made


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_row_that_has_lost_a_layers_cells_goes_on_with_other_tokens(layer: int) -> None:
    spec = rehearsed_spec()
    made = Rehearsing(spec, [0, 6]).generate(PROMPT, 12)
    broken = Rehearsing(spec, [0, 6])
    tokens = broken.prompt([PROMPT])
    broken.pools[0].keys(layer).zero_()
    broken.pools[0].values(layer).zero_()
    while len(tokens) < 12:
        tokens += broken.step(tokens[-1:], [len(PROMPT) + len(tokens) - 1])
    assert tokens != made


def test_the_next_token_is_none_of_those_that_end_a_text_unless_there_is_no_other() -> None:
    assert {next_token(token, 5, 0, 2, {0}) for token in range(20)} == {1}
    assert next_token(3, 5, 0, 1, {0}) == 0


def test_a_stage_is_cut_out_of_a_longer_one_and_of_no_other() -> None:
    stage = stage_of(rehearsed_spec(), LayerRange(1, 5))
    assert stage.part(LayerRange(2, 4)).layers == LayerRange(2, 4)
    with pytest.raises(ConfigError, match="are not all among"):
        stage.part(LayerRange(0, 4))
    with pytest.raises(ConfigError, match="with 6 layers"):
        stage_of(rehearsed_spec(), LayerRange(3, 7))
