"""Where times come from: rooflines, published fits and points, and what lies between points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dejavu.errors import ConfigError
from dejavu.planning.fits import FitCosts
from dejavu.planning.interpolation import PointCosts, between, held_out_error
from dejavu.planning.profile_file import (
    Profile,
    ProfileFile,
    choose_measured,
    choose_published,
    published_files,
    read_profile_file,
)
from dejavu.planning.roofline import Device, RooflineCosts
from dejavu.planning.shape import ModelShape
from dejavu.planning.times import times_of_profile

from harness.planning_kit import tiny_shape

DEVICE = Device(name="d", operations_per_s=1e6, memory_bytes_per_s=1e4, compute_efficiency=0.5, memory_efficiency=0.25)


def test_long_prompts_are_bound_by_arithmetic_and_steps_by_memory() -> None:
    shape, costs = tiny_shape(), RooflineCosts(shape=tiny_shape(), device=DEVICE)
    attention = 4 * (8 * 1000 * 1000 / 2) * 1 * 2 * 24
    operations = 2 * 8 * 1000 * 24 * 500 + attention + 2 * 8 * 22
    assert costs.prompt_time_s(8, 1000) == pytest.approx(operations / 5e5)
    read = (24 * 500 + 22) * 2 + 8 * 1000 * shape.kv_bytes_per_token
    assert costs.step_time_s(8, 1000) == pytest.approx(read / 2500)


def test_devices_of_a_machine_share_the_work() -> None:
    one, four = (RooflineCosts(shape=tiny_shape(), device=DEVICE, num_devices=count) for count in (1, 4))
    assert four.prompt_time_s(2, 50) == pytest.approx(one.prompt_time_s(2, 50) / 4)
    assert "4 x d" in four.source


def test_a_fit_adds_its_terms_and_never_falls_below_zero() -> None:
    fit = FitCosts(
        source="", prompt_fit=(1, 0.1, 0.01), step_fit=(1, 0.5, 2), many_rows_fit=(3, 0.5, 2), many_rows_from=10
    )
    assert fit.prompt_time_s(2, 10) == pytest.approx(1 + 0.1 * 20 + 0.01 * 200)
    assert fit.step_time_s(2, 10) == pytest.approx(1 + 0.5 * 20 + 2 * 2)
    assert fit.step_time_s(10, 10) == pytest.approx(3 + 0.5 * 100 + 2 * 10)
    sinking = FitCosts(
        source="", prompt_fit=(1, -0.1, 0), step_fit=(0, 0, 0), many_rows_fit=(0, 0, 0), many_rows_from=1
    )
    assert sinking.prompt_time_s(2, 100) == 0


def test_between_two_points_lies_a_power_law_and_beyond_them_what_is_asked_for() -> None:
    curve = {1.0: 1.0, 4.0: 16.0}
    assert between(curve, 2.0, beyond=1) == pytest.approx(4)
    assert between(curve, 4.0, beyond=1) == pytest.approx(16)
    assert between(curve, 8.0, beyond=1) == pytest.approx(32)
    assert between(curve, 8.0, beyond=0) == pytest.approx(16)
    assert between(curve, 0.5, beyond=1) == pytest.approx(0.5)
    assert between(curve, 0, beyond=1) == 0
    assert between({3.0: 5.0}, 6.0, beyond=1) == pytest.approx(10)


def test_points_are_hit_exactly_and_a_linear_machine_is_predicted_between_them() -> None:
    def step(rows: int, context: float) -> float:
        return 0.01 + rows * context * 1e-6

    prompts = [(rows, tokens, rows * tokens * 1e-3) for rows in (1, 4, 8) for tokens in (64.0, 256.0)]
    steps = [(rows, context, step(rows, context)) for rows in (1, 4, 8) for context in (64.0, 256.0, 512.0)]
    costs = PointCosts("here", prompts, steps)
    assert costs.source == "here"
    assert costs.prompt_time_s(2, 100) == pytest.approx(0.2)
    assert costs.step_time_s(4, 100) == pytest.approx(step(4, 100))
    assert costs.step_time_s(6, 100) == pytest.approx(step(6, 100), rel=0.01)
    error = held_out_error(costs)
    assert error.num_points > 5
    assert error.max_error is not None
    assert error.max_error < 0.01
    assert costs.covers(4, 100, 200)
    assert not costs.covers(16, 100, 200)
    assert not costs.covers(4, 100, 1000)
    assert not costs.covers(8, 1000, 200)


def test_a_step_at_the_end_of_the_contexts_lies_between_no_others() -> None:
    """A curve: the line through the rest is right in the middle of it alone."""
    steps = [(rows, context, rows * seconds) for rows in (1, 2, 4) for context, seconds in ((10, 1), (20, 1), (30, 9))]
    costs = PointCosts("", [(1, 10.0, 1.0)], [(rows, float(context), float(s)) for rows, context, s in steps])
    error = held_out_error(costs)
    assert error.num_points == 3
    assert error.max_error == pytest.approx(4.0)


def test_few_tokens_that_take_as_long_as_more_do_so_below_the_points_too() -> None:
    """Of short prompts a device reads all weights for as long as it computes."""
    costs = PointCosts("", [(1, 64.0, 0.08), (1, 128.0, 0.08), (1, 256.0, 0.16)], [(1, 1.0, 1.0)])
    assert costs.prompt_time_s(1, 16) == pytest.approx(0.08)
    assert costs.prompt_time_s(1, 512) == pytest.approx(0.32)
    assert costs.prompt_time_s(1, 0) == 0


def test_a_single_point_of_each_kind_is_enough_and_its_error_unknown() -> None:
    costs = PointCosts("", [(2, 10.0, 1.0)], [(2, 10.0, 0.1)])
    assert costs.prompt_time_s(4, 10) == pytest.approx(2)
    assert costs.step_time_s(16, 900) == pytest.approx(0.1)
    error = held_out_error(costs)
    assert (error.num_points, error.median_error, error.max_error) == (0, None, None)


@pytest.mark.parametrize(("file", "profile"), [(file, one) for file in published_files() for one in file.profiles])
def test_every_published_profile_has_source_and_licence_and_gives_plausible_times(
    file: ProfileFile, profile: Profile
) -> None:
    assert "commit" in file.source
    assert file.licence in ("MIT", "Apache-2.0")
    costs = times_of_profile("published", file, profile).costs
    assert profile.label in costs.source
    assert 5 < costs.prompt_time_s(8, 500) / costs.step_time_s(8, 500) < 150


def test_published_times_of_opt_66b_and_bloom_are_those_that_were_published() -> None:
    """Y 2417 ms and t 56.8 ms; 8 prompts of 512 tokens in 1322 ms, a step of 8 rows in 53 ms."""
    opt = choose_published(published_files(), model="opt-66b", hardware="a100-80gb", devices=2, engine=None)
    costs = times_of_profile("published", *opt).costs
    assert costs.prompt_time_s(8, 1000) == pytest.approx(2.417, rel=1e-3)
    assert costs.step_time_s(8, 1000) == pytest.approx(0.0568, rel=1e-2)
    bloom = choose_published(published_files(), model="bloom-176b", hardware="a100-80gb", devices=8, engine=None)
    times = times_of_profile("published", *bloom)
    assert times.costs.prompt_time_s(8, 512) == pytest.approx(1.322, rel=0.02)
    assert times.costs.step_time_s(8, 576) == pytest.approx(0.05295, rel=0.02)
    assert times.held_out is not None
    assert times.held_out.median_error is not None
    assert times.held_out.median_error < 0.05


def test_what_was_not_published_is_refused_with_what_was() -> None:
    with pytest.raises(ConfigError, match=r"model=opt-30b\n.*opt-66b") as caught:
        choose_published(published_files(), model="opt-30b", hardware="a100-80gb", devices=2, engine=None)
    assert len(str(caught.value).splitlines()) <= 3
    with pytest.raises(ConfigError, match=r"2 x v100.*\nthere are: .*8 x a100-80gb \(vllm\)") as caught:
        choose_published(published_files(), model="opt-66b", hardware="v100-16gb", devices=2, engine=None)
    assert len(str(caught.value).splitlines()) <= 3


def profile_file(tmp_path: Path, **changes: object) -> Path:
    profile = {
        "model": "m",
        "hardware": "h",
        "devices": 1,
        "engine": "e",
        "prompt_points": [[1, 10, 0.5]],
        "step_points": [[1, 10, 0.1]],
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"source": "s", "licence": "l", "profiles": [{**profile, **changes}]}))
    return path


def test_a_profile_file_is_read_back(tmp_path: Path) -> None:
    path = profile_file(tmp_path)
    file = read_profile_file(path)
    chosen = choose_measured(file, path, shape=named("m"), devices=1)
    costs = times_of_profile("measured", file, chosen).costs
    assert costs.prompt_time_s(1, 10) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="nothing of model=other"):
        choose_measured(file, path, shape=named("other"), devices=1)


def named(name: str, model_hash: str | None = None) -> ModelShape:
    return replace(tiny_shape(), name=name, model_hash=model_hash)


def test_a_profile_of_other_weights_or_another_dtype_is_refused_with_both(tmp_path: Path) -> None:
    path = profile_file(tmp_path, model="hub", model_hash="aa", dtype="float16")
    file = read_profile_file(path)
    assert choose_measured(file, path, shape=named("hub", "aa"), devices=1)
    assert choose_measured(file, path, shape=named("hub"), devices=1)
    with pytest.raises(ConfigError, match="hash aa, and this one has bb") as caught:
        choose_measured(file, path, shape=named("hub", "bb"), devices=1)
    assert len(str(caught.value).splitlines()) <= 3
    with pytest.raises(ConfigError, match="dtype float16, and this one has float32"):
        choose_measured(file, path, shape=replace(named("hub", "aa"), dtype="float32"), devices=1)


@pytest.mark.parametrize(
    "changes",
    [{"step_points": [[1, 10, 0]]}, {"prompt_points": [[0, 10, 1]]}, {"prompt_points": [[1, 10]]}, {"extra": 1}],
)
def test_a_spoilt_profile_file_is_refused_with_its_path(tmp_path: Path, changes: dict[str, object]) -> None:
    path = profile_file(tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"profile\.path=.*profile\.json: is no profile file"):
        read_profile_file(path)


def test_a_profile_without_times_is_refused(tmp_path: Path) -> None:
    file = read_profile_file(profile_file(tmp_path, prompt_points=[]))
    with pytest.raises(ConfigError, match="no times"):
        times_of_profile("measured", file, file.profiles[0])
