"""``strategy.swapping=auto``: decided before the start, from the memory that is declared and what was measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from dejavu.config import Config, ProfileConfig, ProfileKind
from dejavu.config.strategy import Swapping
from dejavu.control.memory import SWAPPED_MICROBATCHES, most_rows
from dejavu.control.placement import Declared, place
from dejavu.ids import Epoch
from dejavu.models.spec import ModelSpec
from dejavu.planning.shape import shape_of_spec
from dejavu.planning.swap_choice import choose_swapping
from dejavu.planning.swapping import SwapInputs
from dejavu.request import Request
from dejavu.workflows.declared_times import times

logger = logging.getLogger(__name__)

_BYTES_PER_GIGABIT = 10**9 / 8


def with_swapping(config: Config, one: Declared, model: ModelSpec, requests: Sequence[Request]) -> Declared:
    """The declaration with the decision in it, where one is left to make; the log says why.

    Raises ConfigError where the declared profile has no times for the model.
    """
    if config.strategy.swapping is not Swapping.auto:
        _warn_of_few(one)
        return one
    unchecked = replace(one, device_memory_bytes=None, host_memory_bytes=None)
    plan = place(unchecked, model, epoch=Epoch(1))
    choice = choose_swapping(
        rows=one.token_rows,
        most_resident=most_rows(plan, one.limits, swapping=False),
        most_swapped=most_rows(plan, one.limits, swapping=True),
        inputs=_inputs(config, model, one.token_rows, requests),
    )
    logger.info("strategy.swapping=auto: %s: %s", "on" if choice.swapping else "off", choice.reason)
    if choice.warning is not None:
        logger.warning("%s", choice.warning)
    return replace(one, swapping=choice.swapping, swapping_reason=choice.reason)


def _warn_of_few(one: Declared) -> None:
    num_microbatches = one.num_in_flight
    if one.swapping and num_microbatches <= SWAPPED_MICROBATCHES:
        logger.warning(
            "strategy.swapping=on gains nothing with %s microbatches in flight: two always lie on the device; "
            "give a larger strategy.in_flight",
            num_microbatches,
        )


def _inputs(config: Config, model: ModelSpec, rows: int, requests: Sequence[Request]) -> SwapInputs | None:
    """What the rule is asked; None where times or bandwidth are unknown."""
    served = [request for request in requests if request.refusal is None]
    if not served or not _has_times(config.profile):
        return None
    shape = shape_of_spec(config.model.kind, model)
    found = times(config, shape, rows)
    declared_gbps = config.cluster.pcie_gbps
    bandwidth = found.copy_bytes_per_s if declared_gbps is None else declared_gbps * _BYTES_PER_GIGABIT
    if bandwidth is None:
        return None
    prompt, new = mean(len(one.prompt_tokens) for one in served), mean(one.max_tokens for one in served)
    return SwapInputs(
        rows=rows,
        token_time_s=found.costs.step_time_s(rows, prompt + new / 2),
        prompt_tokens=round(prompt),
        num_new_tokens=round(new),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        pcie_bytes_per_s=bandwidth,
    )


def _has_times(profile: ProfileConfig) -> bool:
    """Whether the declared profile says how long a step takes."""
    return profile.effective_kind is not ProfileKind.given or profile.token_time_s is not None
