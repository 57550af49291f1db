"""B31: what is wrong with a command line is told in at most three lines with the nearest valid names."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dejavu.cli.arguments import read_arguments
from dejavu.cli.check import check_command
from dejavu.config import Config, check_paths, validate
from dejavu.errors import ConfigError


def check_config(config: Config) -> None:
    validate(config)
    check_paths(config)


def check(directory: Path, *argv: str) -> argparse.Namespace:
    args = read_arguments(argv)
    check_command(args, directory, check_config)
    return args


def refusal(directory: Path, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(directory, *argv)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    assert "add it with" not in message
    assert "append" not in message
    return message


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("workflow.nam=generate", "workflow.name"),
        ("cluster.num_worker=3", "cluster.num_workers"),
        ("model.max_lenght=8", "model.max_length"),
        ("strategy.split.promt=2", "strategy.split.prompt"),
        ("strategy.spilt.prompt=2", "strategy.split"),
        ("strategy.microbatch.tokens=2", "strategy.microbatch.token"),
        ("transport.timeout=2", "transport.timeout_s"),
        ("workload.rat=2", "workload.rate"),
        ("store.endpoint=[a:1]", "store.endpoints"),
        ("hydra.job.nam=x", "hydra.job.name"),
        ("hydra.runn.dir=x", "hydra.run"),
        ("+cluster.num_worker=3", "cluster.num_workers"),
        ("++cluster.num_worker=3", "cluster.num_workers"),
        ("clustr.num_workers=3", "cluster.num_workers"),
        ("rate=3", "workload.rate"),
        ("modle=local", "model"),
        ("fault.kil=[]", "fault.kill"),
        ("strategy.replicas=1", "strategy.replication"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_one(tmp_path: Path, override: str, meant: str) -> None:
    message = refusal(tmp_path, override)
    assert override.lstrip("+").split("=")[0] in message
    assert f"'{meant}'" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("fault.kill=[{wroker: w1, step: 2}]", "wroker: no such key\ndid you mean 'worker'?"),
        ("fault.kill=[{worker: w1, step: 2, for_s: 1}]", "for_s: no such key\nvalid: at_s, microbatch, phase, step"),
        ("fault.kill=[w1]", "a mapping {key: value, ...} is needed"),
        ("fault.kill=[{worker: w1, step: soon}]", "a whole number is needed"),
        ("fault.kill={worker: w1, step: 2}", "a list is needed"),
        ("fault.kill=[{worker: w7, step: 2}]", "fault.kill[0].worker=w7: no such worker"),
    ],
)
def test_a_fault_that_is_not_written_as_one_is_refused_with_its_keys(tmp_path: Path, override: str, words: str) -> None:
    assert words in refusal(tmp_path, override)


def test_a_fault_may_be_written_on_the_command_line(tmp_path: Path) -> None:
    check(tmp_path, "fault.kill=[{worker: w1, step: 20}]", "fault.stop=[{worker:w0,at_s:1,for_s:2}]")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("workflow=generat", "generate"),
        ("cluster=lokal", "local"),
        ("model=tiny-lama", "tiny-llama"),
        ("model=smollm2", "smollm2-135m"),
        ("strategy=disagregated", "disaggregated"),
        ("transport=ucx_rmda", "ucx_rdma"),
        ("workload=synthetics", "synthetic"),
        ("store=embeded", "embedded"),
        ("experiment=two_by_on", "two_by_one"),
        ("hydra/job_logging=dejvu", "dejavu"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest_one(tmp_path: Path, override: str, meant: str) -> None:
    message = refusal(tmp_path, override)
    assert override in message
    assert f"'{meant}'" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.num_workers=many", "whole number"),
        ("cluster.num_workers=1.5", "whole number"),
        ("workload.rate=fast", "a number"),
        ("workload.ignore_eos=perhaps", "true or false"),
        ("cluster.device=gpu", "cpu, cuda"),
        ("model.dtype=fp32", "float32"),
        ("store.endpoints=a:1", "[a:1]"),
        ("strategy.layers.prompt=[0,3]", "list"),
        ("strategy.split=2", "strategy.split"),
        ("workflow.name=server", "generate"),
        ("hydra.job.chdir=maybe", "hydra.job.chdir"),
        ("model=[local,hub]", "valid"),
        ("model=null", "valid"),
        ("cluster={num_workers:3}", "valid"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_is_valid(tmp_path: Path, override: str, words: str) -> None:
    message = refusal(tmp_path, override)
    assert override.split("=")[0] in message
    assert words in message


@pytest.mark.parametrize(
    "override",
    ["+new.key=1", "+new=1", "+hydra.new=1", "~workload.seed", "~model", "+experiment=splits", "++workload.seed=3",
     "store@other=embedded", "model/sub=x", "foo", "workload", "workload.path", "=3", "a=b=c\\", "workload.path=(",
     "workload.path.x=1"],
)  # fmt: skip
def test_an_override_that_is_no_choice_of_a_value_is_refused(tmp_path: Path, override: str) -> None:
    refusal(tmp_path, override)


@pytest.mark.parametrize(
    "flags", [["--multrun"], ["--cfg"], ["--cfg", "jb"], ["--resolve"], ["-m", "--cfg", "job"],
              ["--experimental-rerun", "x"], ["--config-dir", "nowhere"]],
)  # fmt: skip
def test_a_wrong_flag_is_refused(tmp_path: Path, flags: list[str]) -> None:
    refusal(tmp_path, *flags)


def test_flags_may_stand_between_overrides(tmp_path: Path) -> None:
    args = check(tmp_path, "strategy.split.token=1", "-m", "strategy.split.prompt=1,2")
    assert args.multirun
    assert args.overrides == ["strategy.split.token=1", "strategy.split.prompt=1,2"]


def test_a_missing_model_folder_is_a_missing_folder_and_not_a_misspelt_hub_name(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    message = refusal(tmp_path, "model=local", "model.path=lama")
    assert f"model.path={tmp_path / 'lama'}: no such folder" in message
    assert "'llama'" in message


def test_a_relative_path_starts_at_the_users_directory_in_a_sweep_too(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    check(tmp_path, "-m", "model=local", "model.path=one", "strategy.split.prompt=1,2")
    message = refusal(tmp_path, "-m", "model=local", "model.path=two,three")
    assert f"model.path={tmp_path / 'two'}" in message


def test_a_sweep_is_refused_where_no_point_can_run_and_a_point_where_another_one_can(tmp_path: Path) -> None:
    check(tmp_path, "-m", "strategy.split.prompt=1,0")
    assert "strategy.split.prompt=0" in refusal(tmp_path, "-m", "strategy.split.prompt=0,-1")


def test_names_that_a_sweep_chooses_are_checked_before_any_point_runs(tmp_path: Path) -> None:
    assert "tiny-lama" in refusal(tmp_path, "-m", "model=tiny-llama,tiny-lama")


def test_several_values_without_a_sweep_are_refused_with_the_flag_that_is_missing(tmp_path: Path) -> None:
    assert "-m" in refusal(tmp_path, "strategy.split.prompt=1,2")


def test_the_jobs_of_a_sweeping_experiment_are_checked(tmp_path: Path) -> None:
    check(tmp_path, "experiment=splits")
    check(tmp_path, "experiment=splits", "cluster.num_workers=2")
    assert "cluster.num_workers=1" in refusal(tmp_path, "experiment=splits", "cluster.num_workers=1")


def test_a_variable_of_the_transport_needs_no_plus(tmp_path: Path) -> None:
    check(tmp_path, "transport.settings.UCX_NET_DEVICES=eth0", "+hydra.job.env_set.A=b")
    check(tmp_path, "++transport.settings.UCX_NET_DEVICES=eth0")


def test_the_absence_of_an_experiment_may_be_said(tmp_path: Path) -> None:
    check(tmp_path, "experiment=null")


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "hydra.run.dir" in refusal(tmp_path, "hydra.run.dir=file/out")
    assert "hydra.sweep.dir" in refusal(tmp_path, "-m", "hydra.sweep.dir=file/out", "workload.seed=1,2")


def test_checking_leaves_nothing_in_the_users_directory(tmp_path: Path) -> None:
    check(tmp_path, "hydra.run.dir=out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "option", "words"),
    [
        ("kind: tiny-llama\nsed: 3\n", "model=mine", ["model/mine.yaml", "model.sed", "'seed'"]),
        ("kind: tiny-llama\nnum_layers: x\n", "model=mine", ["model/mine.yaml", "model.num_layers"]),
        ("kind: [\n", "model=mine", ["mine.yaml", "line 2"]),
        ("# @package _global_\ncluser:\n  name: x\n", "experiment=mine", ["experiment/mine.yaml", "'cluster'"]),
        ("# @package _global_\nhydra:\n  job:\n    chdr: 1\n", "experiment=mine", ["hydra.job.chdr", "'chdir'"]),
        (
            "# @package _global_\ndefaults:\n  - override /model: tiny-lama\n",
            "experiment=mine",
            ["model=tiny-lama", "'tiny-llama'"],
        ),
    ],
)
def test_a_fault_in_an_option_file_of_the_user_is_told_with_the_file(
    tmp_path: Path, text: str, option: str, words: list[str]
) -> None:
    group, name = option.split("=")
    folder = tmp_path / "mine" / group
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(text)
    message = refusal(tmp_path, "--config-dir", str(tmp_path / "mine"), option)
    for word in words:
        assert word in message


def test_an_option_file_of_the_user_is_an_option_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("kind: tiny-llama\nnum_layers: 3\n")
    check(tmp_path, "--config-dir", str(tmp_path), "model=mine")
    assert "'mine'" in refusal(tmp_path, "--config-dir", str(tmp_path), "model=mne")
