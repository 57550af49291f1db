"""A plan as a person reads it: the decision, what it promises, the memory of each stage, what comes next."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dejavu.planning.candidates import Candidate
from dejavu.planning.document import warnings
from dejavu.planning.interpolation import HeldOut
from dejavu.planning.memory import StageBytes, memory_table, most_rows
from dejavu.planning.prediction import Prediction, predict
from dejavu.planning.search import Answer
from dejavu.report.amounts import UNKNOWN, show_bytes, show_count, show_rate, show_seconds, show_share


def render_plan(console: Console, answer: Answer) -> None:
    """The plan is on ``console``; ``answer`` has chosen a candidate."""
    console.print(Group(*_sections(answer)))


def _sections(answer: Answer) -> Iterable[RenderableType]:
    chosen = answer.chosen
    if chosen is None:
        return
    yield Rule(Text(_decision(chosen), style="bold"), align="left", style="dim")
    yield Text(answer.reason, style="green" if chosen.mode == "disaggregated" else "yellow")
    yield _promise(answer, chosen)
    yield _table(memory_table(answer.question, chosen))
    if answer.runners_up or answer.refused:
        yield Rule(Text("Runners-up", style="bold"), align="left", style="dim")
        yield _runners_up(answer, chosen)
    for warning in warnings(answer):
        yield Text(f"warning: {warning}", style="yellow")


def _decision(chosen: Candidate) -> str:
    if chosen.mode == "colocated":
        return f"Colocated: prompts and tokens on {show_count(chosen.prompt_depth, 'machine')}"
    prompt, token = show_count(chosen.prompt_depth, "machine"), show_count(chosen.token_depth, "machine")
    return f"Disaggregated: prompts on {prompt}, tokens on {token}"


def _promise(answer: Answer, chosen: Candidate) -> RenderableType:
    question, formulas = answer.question, answer.formulas
    prediction = predict(chosen, question.lengths, question.machines)
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True, style="dim")
    lines.add_column(overflow="fold")
    swapping = ", swapped to host memory" if chosen.swapping else ""
    lines.add_row("microbatches", f"{show_count(chosen.rows, 'row')}, {chosen.in_flight} in flight{swapping}")
    lines.add_row("at most", _most(answer, chosen))
    speed = f"{show_rate(prediction.requests_per_s, 'requests')}, {show_rate(prediction.tokens_per_s, 'tokens')}"
    lines.add_row("throughput", Text(speed, style="bold green"))
    per_token = show_seconds(prediction.normalized_latency_s)
    lines.add_row("latency", f"{show_seconds(prediction.latency_s)}, {per_token} per token")
    if prediction.cost_per_hour is not None:
        lines.add_row("cost", _cost(prediction))
    inputs = formulas.inputs
    lines.add_row("times", f"Y {show_seconds(inputs.prompt_time_s)}, t {show_seconds(inputs.token_time_s)}")
    lines.add_row("", f"{question.times.kind}: {first_sentence(question.times.costs.source)}")
    if question.times.held_out is not None and question.times.held_out.median_error is not None:
        lines.add_row("", held_out_line(question.times.held_out))
    split = "" if formulas.prompt_depth is None else f" ({formulas.prompt_depth} + {formulas.token_depth})"
    lines.add_row(
        "formulas",
        f"I_c {show_seconds(formulas.colocated_s)}, I_p {show_seconds(formulas.prompt_s)}, "
        f"I_t {show_seconds(formulas.token_s)}{split}",
    )
    lines.add_row("", f"Y/t {_number(formulas.ratio)}, must exceed {_number(formulas.threshold)}")
    if answer.swap is not None:
        verdict = "pays" if answer.swap.pays else "does not pay"
        both = f"2Nt {show_seconds(answer.swap.without_s)}, with transfers {show_seconds(answer.swap.with_s)}"
        lines.add_row("swapping", f"{verdict}: {both}")
    return Padding(lines, (1, 0, 1, 0))


def _most(answer: Answer, chosen: Candidate) -> str:
    """How large a microbatch could be in these pipelines, as far as memory goes."""
    resident, swapped = (most_rows(answer.question, chosen, swapping=swapping) for swapping in (False, True))
    if resident is None:
        return "as many rows as wanted: no memory is declared"
    shown = "any number" if swapped is None else show_count(swapped, "row")
    return f"{show_count(resident, 'row')} a microbatch, {shown} where KV is swapped"


def held_out_line(error: HeldOut) -> str:
    """How well times can be interpolated; there is at least one point that could be left out."""
    median, most = show_share(error.median_error), show_share(error.max_error)
    return f"interpolation is off by {median} (median) and {most} (most) at {error.num_points} points left out"


def first_sentence(text: str) -> str:
    """Up to the first full stop that a space follows; plan.json has it all."""
    return text.partition(". ")[0]


def _cost(prediction: Prediction) -> str:
    return (
        f"{_number(prediction.cost_per_hour)} an hour, {_number(prediction.cost_per_1000_requests)} for 1000 requests, "
        f"{_number(prediction.cost_per_million_tokens)} for a million tokens"
    )


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def _table(stages: tuple[StageBytes, ...]) -> Table:
    table = _plain_table()
    table.add_column("pipeline", no_wrap=True)
    for heading in ("stage", "layers", "weights", "KV", "KV in host", "machine"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in stages:
        start, stop = stage.layers.start, stage.layers.stop
        table.add_row(
            stage.pipeline,
            str(stage.stage),
            f"{start}–{stop - 1}" if stop - start > 1 else str(start),
            show_bytes(stage.weight_bytes),
            show_bytes(stage.kv_bytes),
            show_bytes(stage.host_kv_bytes or None),
            show_bytes(stage.machine_bytes) if stage.fits else Text(show_bytes(stage.machine_bytes), style="yellow"),
        )
    return table


def _runners_up(answer: Answer, chosen: Candidate) -> Table:
    table = _plain_table()
    table.add_column("machines", no_wrap=True)
    for heading in ("rows", "requests/s", "speed", "latency"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for one in (chosen, *answer.runners_up, *answer.refused):
        prediction = predict(one, answer.question.lengths, answer.question.machines)
        speed = UNKNOWN if one.row_s == 0 else f"{chosen.row_s / one.row_s:.2f}×"
        table.add_row(
            one.label,
            str(one.rows),
            _number(prediction.requests_per_s),
            speed,
            show_seconds(one.latency_s),
            Text(one.objection or ("chosen" if one is chosen else ""), style="dim"),
        )
    return table


def _plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=(0, 1))
