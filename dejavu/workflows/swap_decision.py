"""``strategy.swapping=auto``: decided before the start, from the memory that is declared and what was measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from dejavu.config import Config, ProfileConfig, ProfileKind
from dejavu.config.strategy import Swapping
from dejavu.control.memory import SWAPPED_MICROBATCHES, most_rows
from dejavu.control.placement import Declared, place
from dejavu.ids import FIRST_EPOCH
from dejavu.models.spec import ModelSpec
from dejavu.planning.shape import shape_of_spec
from dejavu.planning.swap_choice import NOTHING_KNOWN, SwapKnown, choose_swapping
from dejavu.planning.swapping import SwapInputs
from dejavu.request import Request
from dejavu.workflows.declared_times import times

logger = logging.getLogger(__name__)

_BYTES_PER_GIGABIT = 10**9 / 8


def with_swapping(config: Config, one: Declared, model: ModelSpec, requests: Sequence[Request]) -> Declared:
    """The declaration with the decision in it, where one is left to make; the log says why.

    Without ``requests`` the rule is asked for such as fill ``model.max_length``, half prompt, half answer.
    Raises ConfigError where the declared profile has no times for the model.
    """
    if config.strategy.swapping is not Swapping.auto:
        _warn_of_few(one)
        return one
    unchecked = replace(one, device_memory_bytes=None, host_memory_bytes=None)
    plan = place(unchecked, model, epoch=FIRST_EPOCH)
    choice = choose_swapping(
        rows=one.token_rows,
        most_resident=most_rows(plan, one.limits, swapping=False),
        most_swapped=most_rows(plan, one.limits, swapping=True),
        known=_known(config, model, one.token_rows, _lengths(requests, model.max_length)),
    )
    logger.info("strategy.swapping=auto: %s: %s", "on" if choice.swapping else "off", choice.reason)
    if choice.warning is not None:
        logger.warning("strategy.swapping=auto: %s", choice.warning)
    return replace(one, swapping=choice.swapping, swapping_reason=choice.reason)


def _warn_of_few(one: Declared) -> None:
    num_microbatches = one.num_in_flight
    if one.swapping and num_microbatches <= SWAPPED_MICROBATCHES:
        logger.warning(
            "strategy.swapping=on gains nothing with %s microbatches in flight: two always lie on the device; "
            "give a larger strategy.in_flight",
            num_microbatches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """Tokens of the requests that the rule is asked for."""

    prompt: float
    new: float
    words: str


def _lengths(requests: Sequence[Request], max_length: int) -> _Lengths:
    served = [request for request in requests if request.refusal is None]
    if served:
        prompt, new = mean(len(one.prompt_tokens) for one in served), mean(one.max_tokens for one in served)
        return _Lengths(prompt=prompt, new=new, words=f"requests of {prompt:.0f} + {new:.0f} tokens on average")
    # Those that need most are the ones that swapping must be worth it for; which will come is not known.
    prompt = max_length // 2
    new = max_length - prompt
    words = f"requests that fill model.max_length ({prompt} + {new} tokens), since none is known yet"
    return _Lengths(prompt=prompt, new=new, words=words)


def _known(config: Config, model: ModelSpec, rows: int, lengths: _Lengths) -> SwapKnown:
    """What the rule is asked with; its times and bytes are those of the model itself, also where it is rehearsed."""
    if not _has_times(config.profile):
        is_bus_known = config.cluster.pcie_gbps is not None
        return SwapKnown(missing="the time of a step (profile)") if is_bus_known else NOTHING_KNOWN
    shape = shape_of_spec(config.model.kind, model)
    found = times(config, shape, rows)
    declared_gbps = config.cluster.pcie_gbps
    bandwidth = found.copy_bytes_per_s if declared_gbps is None else declared_gbps * _BYTES_PER_GIGABIT
    if bandwidth is None:
        return SwapKnown(missing="the bandwidth to the device (cluster.pcie_gbps, or a profile measured here)")
    tokens = lengths.prompt + lengths.new / 2
    # A rehearsal's sizes are made smaller; its tables are not.
    costs = model.modelled
    step_s = found.costs.step_time_s(rows, tokens) if costs is None else costs.step.at(rows, tokens)
    inputs = SwapInputs(
        rows=rows,
        token_time_s=step_s,
        prompt_tokens=round(lengths.prompt),
        num_new_tokens=round(lengths.new),
        kv_bytes_per_token=round(shape.kv_bytes_per_token / model.kv_scale),
        pcie_bytes_per_s=bandwidth,
    )
    # Times of another machine than this one are no reason to be certain.
    return SwapKnown(inputs=inputs, source=f"{lengths.words}; times: profile={found.kind}")


def _has_times(profile: ProfileConfig) -> bool:
    """Whether the declared profile says how long a step takes."""
    return profile.effective_kind is not ProfileKind.given or profile.token_time_s is not None
