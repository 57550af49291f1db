"""Every value that lies in conf/ composes over the schema and satisfies the checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dejavu.cli.arguments import read_arguments
from dejavu.cli.composer import Composer, composer, declaration, sweep_jobs
from dejavu.config import MODEL_KINDS, SHAPE_KINDS, Config, Dtype, StoreKind, load, validate
from dejavu.config.strategy import Streaming
from dejavu.kv.levels import StreamingLevel

GROUPS = (
    "workflow",
    "cluster",
    "model",
    "strategy",
    "transport",
    "workload",
    "store",
    "fault",
    "profile",
    "bench",
    "apply",
    "experiment",
)
NEEDS = {
    "model=local": ["model.path=folder"],
    "model=hub": ["model.name=owner/name"],
    "workload=file": ["workload.path=prompts.jsonl"],
    "workload=trace": ["workload.path=trace.csv"],
    "profile=measured": ["profile.path=profile.json"],
    "workflow=streaming": ["experiment=fig11"],
    "strategy=auto": ["cluster.num_machines=2"],
    "workflow=plan": ["profile.prompt_time_s=1", "profile.token_time_s=0.1"],
    "workflow=simulate": ["profile.prompt_time_s=1", "profile.token_time_s=0.1"],
    "model=shape": [
        f"model.shape.{key}=8" for key in ("num_layers", "hidden_size", "num_heads", "feed_forward_size", "vocab_size")
    ],
    "workflow=apply": ["store=external", "store.endpoints=[localhost:2379]", "strategy.in_flight=4"],
    "workflow=status": ["store=external", "store.endpoints=[localhost:2379]"],
    "workflow=recovery": ["experiment=fig14"],
    "workflow=swapping": ["experiment=fig13"],
    "workflow=rates": ["experiment=fig12"],
    "store=external": ["store.endpoints=[localhost:2379]"],
}
CONF = Path(__file__).parents[2] / "conf"
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for group in GROUPS for path in (CONF / group).glob("*.yaml"))


@pytest.fixture(scope="module")
def hydra() -> Iterator[Composer]:
    with composer(read_arguments([])) as made:
        yield made


def composed(hydra: Composer, *overrides: str) -> Config:
    return load(declaration(hydra.compose(overrides)), Path("/start"), overrides)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_is_valid(hydra: Composer, option: str) -> None:
    planned = option.removeprefix("model=") in SHAPE_KINDS
    needs = [
        *NEEDS.get(option, []),
        *(["workflow=plan", "workload=lmsys-like", *NEEDS["workflow=plan"]] if planned else []),
    ]
    validate(composed(hydra, option, *needs))


def test_every_group_has_an_option_and_every_option_is_seen(hydra: Composer) -> None:
    seen = {f"{group}={option}" for group, options in hydra.options().items() if group in GROUPS for option in options}
    assert seen == set(OPTIONS)
    assert {option.split("=")[0] for option in OPTIONS} == set(GROUPS)


def test_the_models_options_are_the_kinds_that_the_schema_lists() -> None:
    assert {option.removeprefix("model=") for option in OPTIONS if option.startswith("model=")} == set(MODEL_KINDS)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_models_option_sets_the_kind_of_its_own_name(hydra: Composer, kind: str) -> None:
    assert composed(hydra, f"model={kind}").model.kind == kind


def test_the_default_is_smollm2_on_one_prompt_and_one_token_worker_with_an_embedded_store(hydra: Composer) -> None:
    config = composed(hydra)
    assert config.model.kind == "smollm2-135m"
    assert config.strategy.depths == {"prompt": 1, "token": 1}
    assert config.strategy.num_workers_needed == 2
    assert config.store.kind is StoreKind.embedded
    assert config.model.dtype is Dtype.float32


def test_in_flight_defaults_to_the_token_pipelines_depth_and_for_whole_microbatches_to_both_depths(
    hydra: Composer,
) -> None:
    assert composed(hydra, "strategy.split.token=3").strategy.num_in_flight == 3
    assert composed(hydra, "strategy.split.token=3", "strategy.scheduling=microbatch").strategy.num_in_flight == 4
    assert composed(hydra, "strategy=colocated", "strategy.stages=2").strategy.num_in_flight == 2
    assert composed(hydra, "strategy.in_flight=5").strategy.num_in_flight == 5


def test_relative_paths_start_at_the_users_directory(hydra: Composer) -> None:
    assert composed(hydra, "model=local", "model.path=a/b").model.path == "/start/a/b"
    assert composed(hydra, "workload=file", "workload.path=../p.jsonl").workload.path == "/start/../p.jsonl"
    assert composed(hydra, "store=external", "store.ca_cert=/ca.pem").store.ca_cert == "/ca.pem"


def test_a_variable_of_the_transport_joins_those_of_the_option(hydra: Composer) -> None:
    settings = composed(hydra, "++transport.settings.UCX_NET_DEVICES=eth0").transport.settings
    assert settings["UCX_NET_DEVICES"] == "eth0"
    assert "UCX_RNDV_SCHEME" in settings


def test_the_stores_password_comes_from_the_environment_and_is_not_shown(
    hydra: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEJAVU_STORE_PASSWORD", "hush")
    tree = hydra.compose(["store=external", "store.endpoints=[a:1]", "store.user=me"])
    assert "hush" not in OmegaConf.to_yaml(tree.store)
    store = load(declaration(tree), Path("/start")).store
    assert store.password == "hush"
    assert "hush" not in repr(store)


def test_the_experiment_over_splits_is_a_sweep_of_four_valid_jobs(hydra: Composer) -> None:
    tree = hydra.compose(["experiment=splits"], multirun=True)
    assert tree.hydra.mode.name == "MULTIRUN"
    jobs = sweep_jobs(tree, ["experiment=splits"])
    depths = [composed(hydra, *job).strategy.depths for job in jobs]
    assert sorted((depth["prompt"], depth["token"]) for depth in depths) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for job in jobs:
        validate(composed(hydra, *job))


def test_the_streaming_levels_that_can_be_declared_are_those_of_the_library() -> None:
    assert [level.value for level in Streaming] == [level.value for level in StreamingLevel]
