"""Questions for the planner, for tests."""

from __future__ import annotations

from dejavu.planning.costs import Costs, GivenCosts
from dejavu.planning.question import Lengths, Machines, Question
from dejavu.planning.shape import ModelShape
from dejavu.planning.times import Times


def tiny_shape(num_layers: int = 24, max_length: int = 4096) -> ModelShape:
    """Each layer has 1000 bytes of weights, and a token of a row 8 bytes of KV in it."""
    return ModelShape(
        name="tiny",
        num_layers=num_layers,
        hidden_size=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=10,
        dtype="float16",
        max_length=max_length,
        layer_parameters=500,
        embedding_parameters=20,
        head_parameters=22,
    )


def asked(
    *,
    num_machines: int = 4,
    prompt_s: float = 1.0,
    token_s: float = 0.02,
    new_tokens: int = 100,
    memory_bytes: int | None = None,
    overhead: float | None = 1.0,
    rows: int = 4,
    num_layers: int = 24,
    pcie_gbps: float | None = None,
    link_gbps: float | None = None,
    price: float | None = None,
    host_bytes: int | None = None,
    costs: Costs | None = None,
) -> Question:
    """A question about ``tiny_shape`` and prompts of 100 tokens; a row is as long as a request."""
    return Question(
        machines=Machines(
            count=num_machines,
            device_memory_bytes=memory_bytes,
            host_memory_bytes=host_bytes,
            pcie_gbps=pcie_gbps,
            link_gbps=link_gbps,
            price_per_hour=price,
        ),
        shape=tiny_shape(num_layers, max_length=100 + new_tokens),
        lengths=Lengths(
            num_requests=10,
            mean_prompt_tokens=100,
            max_prompt_tokens=100,
            mean_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        ),
        times=Times(
            kind="given",
            costs=costs or GivenCosts(rows=rows, whole_prompt_time_s=prompt_s, whole_token_time_s=token_s),
        ),
        rows=rows,
        streaming_overhead=overhead,
    )
