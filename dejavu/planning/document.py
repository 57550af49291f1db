"""An answer in the form that people and other tools read: ``plan.json``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from dejavu.planning.candidates import Candidate
from dejavu.planning.interpolation import PointCosts
from dejavu.planning.memory import StageBytes, memory_objection, memory_table, most_rows
from dejavu.planning.prediction import predict
from dejavu.planning.question import Question
from dejavu.planning.search import Answer, Formulas

Document = Mapping[str, object]


def document(answer: Answer) -> Document:
    """Decision first, then what it promises, then every number it came from. Times in seconds, sizes in bytes."""
    chosen, question = answer.chosen, answer.question
    return {
        "feasible": chosen is not None,
        "reason": answer.reason,
        "mode": chosen.mode if chosen else None,
        "split": _split(chosen),
        "stages": chosen.prompt_depth if chosen and chosen.mode == "colocated" else None,
        "microbatch": {"prompt": question.prompt_rows_of(chosen.rows), "token": chosen.rows} if chosen else None,
        "in_flight": chosen.in_flight if chosen else None,
        "max_length": question.shape.max_length,
        "swapping": chosen.swapping if chosen else None,
        "predicted": asdict(predict(chosen, question.lengths, question.machines)) if chosen else None,
        "cost": _cost(answer),
        "memory": [_stage(stage) for stage in memory_table(question, chosen)] if chosen else [],
        "most_rows": {
            "resident": most_rows(question, chosen, swapping=False),
            "swapped": most_rows(question, chosen, swapping=True),
        }
        if chosen
        else None,
        "formulas": _formulas(answer.formulas),
        "swap": {**asdict(answer.swap), "pays": answer.swap.pays} if answer.swap else None,
        "runners_up": [_candidate(one, question) for one in answer.runners_up],
        "refused": [_candidate(one, question) for one in answer.refused],
        "warnings": list(warnings(answer)),
        "inputs": _inputs(question),
    }


def warnings(answer: Answer) -> tuple[str, ...]:
    """What the formulas do not see and a person should."""
    chosen, question = answer.chosen, answer.question
    found = []
    if chosen is None:
        return ()
    if question.machines.count > chosen.num_machines:
        idle = question.machines.count - chosen.num_machines
        more = "what would use more does not fit or is slower" if question.machines.memory_bytes else "no layer is left"
        found.append(
            f"{idle} of {question.machines.count} machines stay idle: {question.shape.num_layers} layers, and {more}"
        )
    if question.declared_length is not None and memory_objection(_as_declared(question), chosen) is not None:
        found.append(
            f"it fits with model.max_length={question.shape.max_length}, the longest request, and not with the "
            f"{question.declared_length} positions that a row has as declared"
        )
    if chosen.swapping and question.declared_length is not None:
        # With strategy=auto the run does as it is planned.
        found.append("a cluster swaps only with strategy.swapping=on, or auto where its rows do not fit otherwise")
    if chosen.mode == "disaggregated" and question.lengths.mean_new_tokens == 0:
        found.append("no token is asked for: the token machines would only receive KV")
    costs, context = question.times.costs, question.mean_context
    if isinstance(costs, PointCosts) and not costs.covers(chosen.rows, question.lengths.mean_prompt_tokens, context):
        found.append(
            f"the profile was not measured for {chosen.rows} rows of {question.lengths.mean_prompt_tokens:.0f} + "
            f"{question.lengths.mean_new_tokens:.0f} tokens: its times are extrapolated"
        )
    handoff_s, used = question.handoff_s(chosen.rows), answer.formulas.inputs
    given = question.streaming_overhead is not None
    if (
        chosen.mode == "disaggregated"
        and given
        and handoff_s
        and handoff_s > used.streaming_overhead * used.prompt_time_s
    ):
        found.append(
            f"the KV of a microbatch takes {handoff_s:.4g} s over a link, longer than its prompts with "
            f"profile.streaming_overhead={used.streaming_overhead:g}"
        )
    if question.lengths.max_prompt_tokens + question.lengths.max_new_tokens > question.shape.max_length:
        found.append(
            f"the longest request is longer than the {question.shape.max_length} positions of model.max_length"
        )
    return tuple(found)


def _as_declared(question: Question) -> Question:
    """The same with rows as long as a cluster's are when it is told nothing of the plan's."""
    assert question.declared_length is not None
    return replace(question, shape=replace(question.shape, max_length=question.declared_length))


def _split(chosen: Candidate | None) -> Document | None:
    if chosen is None or chosen.mode == "colocated":
        return None
    return {"prompt": chosen.prompt_depth, "token": chosen.token_depth}


def _cost(answer: Answer) -> Document:
    question = answer.question
    prediction = predict(answer.chosen, question.lengths, question.machines) if answer.chosen else None
    return {
        "price_per_machine_hour": question.machines.price_per_hour,
        "per_hour": prediction.cost_per_hour if prediction else None,
        "per_1000_requests": prediction.cost_per_1000_requests if prediction else None,
        "per_million_tokens": prediction.cost_per_million_tokens if prediction else None,
    }


def _formulas(formulas: Formulas) -> Document:
    inputs = formulas.inputs
    return {
        "I_c": formulas.colocated_s,
        "I_p": formulas.prompt_s,
        "I_t": formulas.token_s,
        "ratio": formulas.ratio,
        "threshold": formulas.threshold,
        "may_pay": formulas.may_pay,
        "min_prompt_depth": formulas.min_prompt_depth,
        "min_token_depth": formulas.min_token_depth,
        "split": {"prompt": formulas.prompt_depth, "token": formulas.token_depth} if formulas.prompt_depth else None,
        "equal_split": {"prompt": formulas.equal_split[0], "token": formulas.equal_split[1]}
        if formulas.equal_split
        else None,
        "inputs": {
            "D": inputs.num_machines,
            "L": inputs.num_layers,
            "M": inputs.machine_memory_bytes,
            "W0": inputs.layer_weight_bytes,
            "C0": inputs.prompt_kv_bytes,
            "K0": inputs.token_kv_bytes,
            "Y": inputs.prompt_time_s,
            "t": inputs.token_time_s,
            "N": inputs.num_new_tokens,
            "m": inputs.streaming_overhead,
        },
    }


def _candidate(candidate: Candidate, question: Question) -> Document:
    prediction = predict(candidate, question.lengths, question.machines)
    return {
        "mode": candidate.mode,
        "split": _split(candidate),
        "stages": candidate.prompt_depth if candidate.mode == "colocated" else None,
        "microbatch": candidate.rows,
        "swapping": candidate.swapping,
        "round_s": candidate.round_s,
        "requests_per_s": prediction.requests_per_s,
        "latency_s": candidate.latency_s,
        "objection": candidate.objection,
    }


def _stage(stage: StageBytes) -> Document:
    return {
        "pipeline": stage.pipeline,
        "stage": stage.stage,
        "layers": [stage.layers.start, stage.layers.stop],
        "weight_bytes": stage.weight_bytes,
        "kv_bytes": stage.kv_bytes,
        "host_kv_bytes": stage.host_kv_bytes,
        "machine_bytes": stage.machine_bytes,
        "fits": stage.fits,
    }


def _profile(question: Question) -> Document:
    times = question.times
    return {
        "kind": times.kind,
        "source": times.costs.source,
        "licence": times.licence,
        "held_out": asdict(times.held_out) if times.held_out else None,
    }


def _inputs(question: Question) -> Document:
    return {
        "cluster": asdict(question.machines),
        "model": asdict(question.shape),
        "workload": asdict(question.lengths),
        "microbatch": question.rows,
        "profile": _profile(question),
        "handoff_s": question.handoff_s(question.rows),
    }
