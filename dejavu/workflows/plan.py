"""``workflow=plan``: whether and how to split the machines, before anything is spent. Starts nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dejavu.clock import SystemClock
from dejavu.config import Config, Scheduling, StrategyMode, WorkflowName
from dejavu.config.strategy import Swapping
from dejavu.errors import InfeasibleError
from dejavu.models.source import has_tokenizer
from dejavu.models.tokenizer import TextCodec
from dejavu.planning.document import document
from dejavu.planning.question import Lengths, Machines, Question, SwappingWish
from dejavu.planning.search import plan
from dejavu.planning.shape import ModelShape, shape_of_spec
from dejavu.planning.sizing import plan_with_rows
from dejavu.planning.times import Times
from dejavu.report.json_file import write_json
from dejavu.report.progress import RichProgress
from dejavu.workflows.declared_times import declared_shape, times
from dejavu.workflows.plan_report import render_plan
from dejavu.workflows.preparation import prepare_model, worker_devices
from dejavu.workload import RequestLength, request_lengths

logger = logging.getLogger(__name__)

_GB = 10**9
LEAST_LENGTH = 2
"""Positions of a row: a prompt's token and an answer's."""
_WISHES: Mapping[Swapping, SwappingWish] = {Swapping.off: "off", Swapping.auto: "auto", Swapping.on: "on"}


def run(config: Config, output: Path) -> None:
    """``plan.json`` is in ``output`` and the plan on the console; both also where the answer is no.

    Raises ConfigError, and InfeasibleError, with numbers, when no way to use the machines can be done.
    """
    console = Console()
    # With strategy=auto the declared rows are the most, as they are in a run.
    decide = plan_with_rows if config.strategy.mode is StrategyMode.auto else plan
    answer = decide(question(config))
    write_json(output / "plan.json", document(answer))
    logger.info("%s", answer.reason)
    if answer.chosen is None:
        raise InfeasibleError(answer.reason)
    render_plan(console, answer)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def question(config: Config) -> Question:
    """What the declaration asks. Fetches or makes the model where it is one that runs. Raises ConfigError."""
    shape, codec = model_shape(config)
    return question_of(config, shape, summarised(request_lengths(config.workload, codec, shape.vocab_size)))


def question_of(config: Config, shape: ModelShape, lengths: Lengths) -> Question:
    """What the declaration asks of a model and a workload that are known. Raises ConfigError."""
    strategy = config.strategy
    rows, is_auto = strategy.microbatch.token, strategy.mode is StrategyMode.auto
    found = times(config, shape, rows)
    longest = max(LEAST_LENGTH, lengths.max_prompt_tokens + lengths.max_new_tokens)
    if config.workflow.name is WorkflowName.serve:
        # The workload is an example of what will come: longer requests are served, too.
        longest = shape.max_length
    return Question(
        machines=_with_measured_bus(machines(config), found),
        # What is declared is often the model's own limit, whatever the workload: a plan says what is enough.
        shape=replace(shape, max_length=min(shape.max_length, longest)),
        lengths=lengths,
        times=found,
        rows=rows,
        streaming_overhead=config.profile.streaming_overhead,
        # A strategy that is left to the planner limits it; any other is what the plan is to take the place of.
        most_rows=rows if is_auto else None,
        prompt_rows=strategy.microbatch.prompt if is_auto else None,
        scheduling="row" if strategy.scheduling is Scheduling.row else "microbatch",
        swapping=_WISHES[strategy.swapping] if is_auto else "auto",
        declared_length=None if is_auto else shape.max_length,
    )


def _with_measured_bus(declared: Machines, found: Times) -> Machines:
    """The machines, with the bandwidth to the host that was measured where none is declared."""
    if declared.pcie_gbps is not None or found.copy_bytes_per_s is None:
        return declared
    return replace(declared, pcie_gbps=found.copy_bytes_per_s * 8 / _GB)


def model_shape(config: Config) -> tuple[ModelShape, TextCodec | None]:
    """The model's sizes, and its tokenizer where it has one."""
    model = config.model
    if model.is_shape:
        return declared_shape(model), None
    with RichProgress(Console(stderr=True), SystemClock()) as progress:
        spec = prepare_model(model, progress)
    folder = Path(spec.folder)
    return shape_of_spec(model.kind, spec), TextCodec(folder) if has_tokenizer(folder) else None


def machines(config: Config) -> Machines:
    """The declared machines; where their number is left open, one for each worker of the strategy."""
    cluster = config.cluster
    memory_gb = cluster.device_memory_gb
    return Machines(
        count=cluster.num_machines or cluster.num_workers or config.strategy.num_workers_needed,
        devices_each=_devices_each(config),
        device_memory_bytes=None if memory_gb is None else max(1, int(memory_gb * _GB)),
        host_memory_bytes=None if cluster.host_memory_gb is None else max(1, int(cluster.host_memory_gb * _GB)),
        link_gbps=cluster.link_gbps,
        pcie_gbps=cluster.pcie_gbps,
        price_per_hour=cluster.price_per_hour,
    )


def _devices_each(config: Config) -> int:
    """Devices of a machine; of one that is left to the planner and that will compute, those of its worker."""
    will_run = config.strategy.mode is StrategyMode.auto and not config.model.is_shape
    return worker_devices(config) if will_run else config.cluster.devices_per_machine


def summarised(lengths: Sequence[RequestLength]) -> Lengths:
    """Means and maxima of at least one request."""
    count = len(lengths)
    return Lengths(
        num_requests=count,
        mean_prompt_tokens=sum(one.prompt for one in lengths) / count,
        max_prompt_tokens=max(one.prompt for one in lengths),
        mean_new_tokens=sum(one.new for one in lengths) / count,
        max_new_tokens=max(one.new for one in lengths),
    )
