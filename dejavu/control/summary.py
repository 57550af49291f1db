"""The plan in the form that people and other tools read: ``plan.json``. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dejavu.control.memory import stage_memory
from dejavu.control.plan import Pipeline, Place, Plan
from dejavu.models.modelled_times import ModelledTimes


def summary(plan: Plan) -> Mapping[str, object]:
    """Mode, pipelines with their stages, batch sizes, and the predicted memory beside the inputs it came from."""
    model = plan.model
    return {
        "epoch": plan.epoch,
        "mode": plan.mode,
        "pipelines": [_pipeline(plan, pipeline) for pipeline in plan.pipelines],
        "microbatch": {
            "prompt": plan.prompt_rows,
            "prompt_tokens": plan.prompt_tokens,
            "token": plan.token_pipeline.microbatch_rows,
        },
        "in_flight": plan.token_pipeline.in_flight,
        "scheduling": plan.scheduling,
        "streaming": plan.streaming.value,
        "stream_to": plan.stream_to,
        "swapping": plan.swapping,
        "swapping_reason": plan.swapping_reason,
        "bus_bytes_per_s": plan.bus_bytes_per_s,
        "replication": plan.replication,
        "copy_steps": plan.copy_steps,
        "recovery": plan.recovery,
        "standby": list(plan.standby),
        "predicted": {
            "rows": plan.token_pipeline.num_rows,
            "kv_bytes_per_row": round(model.layout.row_bytes(model.num_layers) / model.kv_scale),
            "kv_bytes_per_position": round(model.num_layers * model.layout.position_bytes / model.kv_scale),
        },
        "rehearsal": _rehearsal(model.modelled),
        "inputs": {
            "model": model.folder,
            "family": model.family,
            "model_hash": model.model_hash,
            "dtype": model.dtype,
            "max_length": model.max_length,
            "num_layers": model.num_layers,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "layer_parameters": model.layer_parameters,
            "embedding_parameters": model.embedding_parameters,
            "head_parameters": model.head_parameters,
            "device": plan.device,
            "threads_per_worker": plan.threads_per_worker,
        },
    }


def _rehearsal(times: ModelledTimes | None) -> Mapping[str, object] | None:
    """Of a plan whose stages compute: None."""
    if times is None:
        return None
    return {"times": times.source, "time_scale": times.time_scale, "kv_scale": times.kv_scale}


def _pipeline(plan: Plan, pipeline: Pipeline) -> Mapping[str, object]:
    stages = []
    for stage in pipeline.stages:
        memory = stage_memory(plan, Place(pipeline=pipeline, stage=stage))
        stages.append(
            {
                "worker": stage.worker,
                "layers": [stage.layers.start, stage.layers.stop],
                "predicted": {
                    "weight_bytes": memory.weight_bytes,
                    "kv_bytes": memory.kv_bytes,
                    "host_kv_bytes": memory.host_kv_bytes,
                },
            }
        )
    return {"kind": pipeline.kind, "microbatch": pipeline.microbatch_rows, "stages": stages}
