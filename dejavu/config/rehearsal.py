"""What a rehearsal is, as the declaration says it, and what it must satisfy. Pure."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

from dejavu.errors import ConfigError

if TYPE_CHECKING:
    from dejavu.config.schema import Config, ModelConfig

DEFAULT_KV_SCALE = 1 / 64
"""OPT-66B with 32 rows of 2,048 positions, and a copy of each, then takes 4 GB."""
RUNNING = ("generate", "recovery", "rates", "serve", "swapping")
"""Workflows that can be rehearsed."""
_STARTING_NOTHING = ("plan", "simulate")
_MOST_SCALE = 1000.0


class Compute(Enum):
    """What a stage does with its layers: it computes them, or waits for as long as ``profile`` says (a rehearsal)."""

    real = "real"
    modelled = "modelled"


def check_rehearsal(config: Config) -> None:
    """The rehearsal is one that can be made, or there is none. Raises ConfigError naming key, value and limit."""
    if config.model.compute is Compute.modelled:
        _check_scales(config.model)
        _check_surroundings(config)
        return
    for key, default in (("time_scale", 1.0), ("kv_scale", DEFAULT_KV_SCALE)):
        value = getattr(config.model, key)
        if value != default:
            raise ConfigError(f"model.{key}={value:g}: is for a rehearsal; add model.compute=modelled")


def _check_scales(model: ModelConfig) -> None:
    if not (math.isfinite(model.time_scale) and 1 / _MOST_SCALE <= model.time_scale <= _MOST_SCALE):
        raise ConfigError(
            f"model.time_scale={model.time_scale:g}: must be from {1 / _MOST_SCALE:g} to {_MOST_SCALE:g}; "
            "0.1 is ten times as fast"
        )
    if not 0 < model.kv_scale <= 1:
        raise ConfigError(f"model.kv_scale={model.kv_scale:g}: must be more than 0 and at most 1")


def _check_surroundings(config: Config) -> None:
    workflow = config.workflow.name.value
    if workflow in _STARTING_NOTHING:
        # They take the same times from the same profile, and compute nothing anyway.
        return
    if workflow not in RUNNING:
        raise ConfigError(
            f"model.compute=modelled: is for workflow={', '.join(RUNNING)}, and the choice is "
            f"{workflow}\nwhat a stage computes can only be measured where it computes"
        )
    if config.cluster.device.value != "cpu":
        raise ConfigError(
            f"cluster.device={config.cluster.device.value}: a rehearsal waits, and its KV lies in host memory\n"
            "take cluster.device=cpu, and say by profile what is rehearsed"
        )
