"""``workflow=profile``: how long prompts and steps of a model take on one worker, kept for planner and simulator.

One worker has the whole model. It serves microbatches of every size one at a time, each alone, and its own spans say
how long it computed. Others may compute beside it meanwhile, as the stages of a cluster on one machine do.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import median

from msgspec.structs import replace as replace_struct
from rich.console import Console

from dejavu.clock import Clock, SystemClock
from dejavu.config import Config, ProfilingConfig, Scheduling, StrategyConfig, StrategyMode
from dejavu.config.strategy import MicrobatchConfig
from dejavu.control.placement import place
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError
from dejavu.ids import FIRST_EPOCH, RequestId
from dejavu.kv.copy_speed import measured_copy_bytes_per_s
from dejavu.models.spec import ModelSpec
from dejavu.planning.profile_file import Profile, ProfileFile
from dejavu.planning.times import Times, times_of_profile
from dejavu.report.json_file import write_json
from dejavu.report.machine import machine
from dejavu.report.progress import RichProgress
from dejavu.report.spans import Span
from dejavu.report.streaming_table import Columns, as_text, write_table
from dejavu.request import Request
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.plan_report import held_out_line
from dejavu.workflows.preparation import declared, prepare_model
from dejavu.workflows.profile_neighbours import neighbours
from dejavu.workflows.streaming_batch import Bench
from dejavu.workflows.streaming_case import BatchBar
from dejavu.workload.synthetic import TokenSource

logger = logging.getLogger(__name__)

_LEVEL = "off"
_NEIGHBOUR_STEPS = 24


def run(config: Config, output: Path) -> None:
    """``profile.json`` and ``table.csv`` are in ``output``. Raises DejavuError when the worker failed."""
    console, clock = Console(), SystemClock()
    profiling = config.profiling
    alone = one_worker(config)
    with RichProgress(Console(stderr=True), clock) as progress:
        spec = prepare_model(alone.model, progress)
        plan = place(declared(alone), spec, epoch=FIRST_EPOCH)
        bar = BatchBar(progress, len(profiling.rows) + profiling.repeats * len(_points(profiling)))
        beside = neighbours(profiling.neighbours, alone, plan, output, clock, _busy_batch(profiling, spec))
        with running_cluster(alone, plan, output, progress) as cluster, beside:
            bench = Bench(cluster, plan, clock, bar.part)
            samples = measure(profiling, spec, bar, lambda requests: _only(bench.serve(_LEVEL, requests).spans))
    profile = replace_struct(profile_of(config, plan, samples), copy_bytes_per_s=copy_speed(profiling, plan))
    file = ProfileFile(source=_source(config, clock), licence="your own", profiles=(profile,))
    write_json(output / "profile.json", file)
    report(console, output, samples, times_of_profile("measured", file, profile))


def one_worker(config: Config) -> Config:
    """The declaration of a single worker with the whole model and room for the largest microbatch."""
    profiling, rows = config.profiling, max(config.profiling.rows)
    strategy = StrategyConfig(
        mode=StrategyMode.colocated,
        microbatch=MicrobatchConfig(prompt=rows, prompt_tokens=None, token=rows),
        in_flight=1,
        scheduling=Scheduling.microbatch,
    )
    # Just enough positions: a longer buffer would cost memory and show nothing.
    length = config.model.max_length or max(profiling.prompt_tokens) + profiling.steps + 1
    return replace(config, strategy=strategy, model=replace(config.model, max_length=length))


@dataclass(slots=True)
class Samples:
    """What was measured at one point: seconds of each pass."""

    rows: int
    tokens: int
    prompts_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between two steps: what the loop costs beside them."""


def measure(
    profiling: ProfilingConfig, spec: ModelSpec, bar: BatchBar, serve: Callable[[Sequence[Request]], Sequence[Span]]
) -> list[Samples]:
    """Every point was measured, the rounds one after the other, after a batch of each size for warming up.

    ``serve`` answers the requests as one microbatch and returns its worker's spans.
    """
    source = TokenSource(spec.vocab_size, spec.eos_token_ids, seed=0)
    for rows in profiling.rows:
        bar.begin(f"{rows} rows, warming up")
        serve(_requests(source, rows, max(profiling.prompt_tokens), profiling.steps))
        bar.end()
    samples = [Samples(rows=rows, tokens=tokens) for rows, tokens in _points(profiling)]
    for round_index, one in itertools.product(range(profiling.repeats), samples):
        bar.begin(f"{one.rows} rows of {one.tokens} tokens, round {round_index + 1} of {profiling.repeats}")
        _add(one, serve(_requests(source, one.rows, one.tokens, profiling.steps)))
        bar.end()
    return samples


def _busy_batch(profiling: ProfilingConfig, spec: ModelSpec) -> list[Request]:
    """For neighbours: short prompts and enough steps that both take their share."""
    source = TokenSource(spec.vocab_size, spec.eos_token_ids, seed=1)
    tokens = min(profiling.prompt_tokens)
    most = spec.max_length - tokens - 1
    return _requests(source, sorted(profiling.rows)[len(profiling.rows) // 2], tokens, min(_NEIGHBOUR_STEPS, most))


def _points(profiling: ProfilingConfig) -> list[tuple[int, int]]:
    return list(itertools.product(profiling.rows, profiling.prompt_tokens))


def _requests(source: TokenSource, rows: int, tokens: int, steps: int) -> list[Request]:
    return [
        Request(
            id=RequestId(f"row-{index}"),
            prompt_tokens=source.draw(index, tokens),
            max_tokens=steps + 1,
            ignore_eos=True,
        )
        for index in range(rows)
    ]


def _add(one: Samples, spans: Sequence[Span]) -> None:
    """The batch's passes are in ``one``. Raises DejavuError where the rows did not go together."""
    computing = [span for span in spans if span.category == "compute"]
    prompts = [span for span in computing if span.name == "prompt"]
    steps = [span for span in computing if span.name == "step"]
    if [span.args.get("rows") for span in prompts] != [one.rows] or not steps:
        parts = [span.args.get("rows") for span in prompts]
        raise DejavuError(f"{one.rows} rows were computed as {parts} in place of together; run.log says why")
    one.prompts_s.append(prompts[0].duration_s)
    one.steps_s += [span.duration_s for span in steps]
    ends = [span.start_s + span.duration_s for span in steps]
    one.gaps_s += [max(0.0, later.start_s - end) for end, later in zip(ends, steps[1:], strict=False)]


def _only(spans: object) -> Sequence[Span]:
    """Of the one worker."""
    assert isinstance(spans, dict)
    (own,) = spans.values()
    return list(own)


def profile_of(config: Config, plan: Plan, samples: Sequence[Samples]) -> Profile:
    """The medians as a profile."""
    steps = config.profiling.steps
    return Profile(
        model=config.model.kind,
        hardware=f"{machine()}; {plan.threads_per_worker} thread(s), {plan.device}, {plan.model.dtype}",
        devices=1,
        engine="dejavu",
        model_hash=plan.model.model_hash,
        dtype=plan.model.dtype,
        prompt_points=tuple((one.rows, one.tokens, median(one.prompts_s)) for one in samples),
        # A step reads the positions before it: in the mean those of the prompt and half of the steps.
        step_points=tuple((one.rows, one.tokens + steps / 2, median(one.steps_s)) for one in samples),
    )


def _source(config: Config, clock: Clock) -> str:
    measured_on = datetime.fromtimestamp(clock.now()).date().isoformat()
    beside = config.profiling.neighbours
    others = f", {beside} more worker(s) computing beside it" if beside else ""
    return f"Measured by workflow=profile on {measured_on}, median of {config.profiling.repeats} rounds{others}."


def copy_speed(profiling: ProfilingConfig, plan: Plan) -> float:
    """Of the largest microbatch, once the worker is gone."""
    layout = plan.model.layout
    tokens = min(max(profiling.prompt_tokens), layout.max_length)
    return measured_copy_bytes_per_s(layout, rows=max(profiling.rows), tokens=tokens, device=plan.device)


def report(console: Console, output: Path, samples: Sequence[Samples], times: Times) -> None:
    """The table is in ``output`` and on the console, with how well it can be interpolated."""
    rows = [_columns(one) for one in samples]
    write_table(output / "table.csv", rows)
    console.print(as_text(rows))
    if times.held_out is not None and times.held_out.median_error is not None:
        console.print(held_out_line(times.held_out), highlight=False)
    console.print(
        f"for plans: profile=measured profile.path={output / 'profile.json'}", highlight=False, soft_wrap=True
    )


def _columns(one: Samples) -> Columns:
    prompts_s, step_s = median(one.prompts_s), median(one.steps_s)
    return {
        "rows": one.rows,
        "prompt_tokens": one.tokens,
        "prompts_s": prompts_s,
        "step_s": step_s,
        "ratio": prompts_s / step_s,
        "between_steps_s": median(one.gaps_s) if one.gaps_s else 0.0,
    }
