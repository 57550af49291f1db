"""``strategy=auto``: the planner's choice takes the place of the declared strategy, before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dejavu.config import Config, StrategyMode
from dejavu.config.strategy import Scheduling, SplitConfig, Swapping
from dejavu.errors import InfeasibleError
from dejavu.planning.candidates import Candidate
from dejavu.planning.document import document
from dejavu.planning.search import Answer
from dejavu.planning.shape import shape_of_spec, spec_of_shape
from dejavu.planning.sizing import plan_with_rows
from dejavu.report.json_file import write_json
from dejavu.report.progress import Progress
from dejavu.workflows.declared_times import declared_shape
from dejavu.workflows.plan import question_of, summarised
from dejavu.workflows.preparation import codec_of, prepare_model
from dejavu.workload import request_lengths

logger = logging.getLogger(__name__)


def decided(config: Config, output: Path, progress: Progress) -> tuple[Config, Answer | None]:
    """The declaration with a strategy that can run, and the plan behind it; as it is, where none is left to decide.

    The answer is in ``output`` as ``plan.json``, also when it is no. Raises ConfigError, and InfeasibleError where
    nothing fits.
    """
    if config.strategy.mode is not StrategyMode.auto:
        return config, None
    answer = answered(config, progress)
    write_json(output / "plan.json", document(answer))
    if answer.chosen is None:
        raise InfeasibleError(answer.reason)
    progress.note(f"strategy=auto: {answer.reason}")
    logger.info("strategy=auto: %s", answer.reason)
    return with_strategy(config, answer.chosen, answer.question.shape.max_length), answer


def answered(config: Config, progress: Progress) -> Answer:
    """The planner's answer for the declared machines, model, workload and profile."""
    model = config.model
    spec = spec_of_shape(declared_shape(model)) if model.is_shape else prepare_model(model, progress)
    lengths = summarised(request_lengths(config.workload, codec_of(spec), spec.vocab_size))
    return plan_with_rows(question_of(config, shape_of_spec(model.kind, spec), lengths))


def with_strategy(config: Config, chosen: Candidate, max_length: int) -> Config:
    """The declaration with the chosen pipelines and microbatches, and rows of so many positions."""
    declared = config.strategy
    is_split = chosen.mode == "disaggregated"
    strategy = replace(
        declared,
        mode=StrategyMode.disaggregated if is_split else StrategyMode.colocated,
        split=SplitConfig(prompt=chosen.prompt_depth, token=chosen.token_depth) if is_split else SplitConfig(),
        stages=1 if is_split else chosen.prompt_depth,
        # A plan counts on whole microbatches; where each row is replaced at once, more of them would be emptier ones.
        in_flight=chosen.in_flight if declared.scheduling is Scheduling.microbatch else None,
        swapping=Swapping.on if chosen.swapping else Swapping.off,
        microbatch=replace(declared.microbatch, token=chosen.rows, prompt=min(declared.microbatch.prompt, chosen.rows)),
    )
    # Room for the longest request, as the plan counts it; a model's own limit may be many times as much.
    return replace(config, strategy=strategy, model=replace(config.model, max_length=max_length))


def with_prediction(summary: Mapping[str, object], answer: Answer | None) -> Mapping[str, object]:
    """What ``plan.json`` says of the plan in force, and, where the planner decided, its prediction and inputs."""
    return summary if answer is None else {**summary, "planner": document(answer)}
