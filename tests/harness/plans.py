"""Plans and specs made up for tests that compute nothing."""

from __future__ import annotations

from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan, Scheduling
from dejavu.ids import Epoch
from dejavu.models.spec import ModelSpec

VOCAB_SIZE = 50
EOS = 0


def made_up_spec(*, num_layers: int = 6, max_length: int = 64, head_parameters: int = 0) -> ModelSpec:
    """A model that exists only on paper."""
    return ModelSpec(
        folder="/nowhere",
        family="llama",
        dtype="float32",
        max_length=max_length,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=32,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        model_hash="0" * 32,
        layer_parameters=1000,
        embedding_parameters=500,
        head_parameters=head_parameters,
    )


def split_plan(
    prompt: int = 1,
    token: int = 2,
    *,
    prompt_rows: int = 2,
    token_rows: int = 2,
    in_flight: int | None = None,
    scheduling: Scheduling = "row",
    timeout_s: float = 60.0,
) -> Plan:
    """A disaggregated plan."""
    declared = Declared(
        mode="disaggregated",
        prompt_depth=prompt,
        token_depth=token,
        prompt_rows=prompt_rows,
        token_rows=token_rows,
        in_flight=in_flight,
        scheduling=scheduling,
        timeout_s=timeout_s,
    )
    return place(declared, made_up_spec(), epoch=Epoch(1))


def colocated_plan(
    depth: int = 2,
    *,
    prompt_rows: int = 2,
    token_rows: int = 2,
    in_flight: int | None = None,
    scheduling: Scheduling = "row",
) -> Plan:
    """A colocated plan."""
    declared = Declared(
        mode="colocated",
        colocated_depth=depth,
        prompt_rows=prompt_rows,
        token_rows=token_rows,
        in_flight=in_flight,
        scheduling=scheduling,
    )
    return place(declared, made_up_spec(), epoch=Epoch(1))
