"""After the handoff, K and V of every global layer equal transformers' own cache (field report B01)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from dejavu.engine import messages as m
from dejavu.models.reference import load_reference
from dejavu.request import Request

from harness.cluster_kit import Kit, cluster, ragged_requests


def landed_cells(kit: Kit, slot: int, length: int) -> dict[int, torch.Tensor]:
    """[K, V] of each global layer, [2, head, position, dim], as the token stages hold them."""
    stages = kit.plan.token_pipeline.stages
    answers = kit.cluster.links.ask(
        m.InspectRow(epoch=kit.plan.epoch, microbatch=0, row_index=slot, length=length),
        [stage.worker for stage in stages],
        m.InspectedRow,
        timeout_s=30.0,
    )
    cells: dict[int, torch.Tensor] = {}
    model = kit.plan.model
    for stage in stages:
        answer = answers[stage.worker]
        flat = torch.frombuffer(bytearray(answer.inbound.payload), dtype=getattr(torch, model.dtype))
        shaped = flat.view(len(stage.layers), 2, model.num_kv_heads, length, model.head_dim)
        cells.update(zip(stage.layers.indices, shaped, strict=True))
        answer.inbound.release()
    return cells


def reference_cells(folder: Path, request: Request) -> list[torch.Tensor]:
    cache = DynamicCache()
    with torch.inference_mode():
        load_reference(folder)(torch.tensor([request.prompt_tokens]), cache=cache, use_cache=True)
    return [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_layers", "kv_heads", "split"),
    [("llama", 7, 2, (3, 2)), pytest.param("opt", 5, 4, (1, 3), marks=pytest.mark.grid)],
)
def test_every_layer_of_a_streamed_row_equals_the_reference_cache(
    family: str, num_layers: int, kv_heads: int, split: tuple[int, int], output: Path, nothing_left: None
) -> None:
    with cluster(
        output,
        f"model=tiny-{family}",
        f"model.num_layers={num_layers}",
        f"model.num_kv_heads={kv_heads}",
        f"strategy.split.prompt={split[0]}",
        f"strategy.split.token={split[1]}",
        "strategy.microbatch.token=4",
        "strategy.in_flight=1",
    ) as kit:
        requests = ragged_requests(4, vocab_size=kit.plan.model.vocab_size, seed=2, max_tokens=14)
        kit.serve(requests)
        for slot, request in enumerate(requests):
            cells = landed_cells(kit, slot, len(request.prompt_tokens))
            expected = reference_cells(kit.folder, request)
            assert sorted(cells) == list(range(num_layers))
            for layer in range(num_layers):
                assert (cells[layer] - expected[layer]).abs().max() < 1e-5, f"row {slot}, layer {layer}"
