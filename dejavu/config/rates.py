"""The shape of the section ``rates``, and what a declaration must satisfy for ``workflow=rates``. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from dejavu.errors import ConfigError

if TYPE_CHECKING:
    from dejavu.config.schema import Config

_MOST_RATE = 1e6
_ADVICE = "experiment=fig12 sets what the comparison needs"


class RateCase(Enum):
    """Ways to use the machines of the declared split: all in one pipeline, or as the split says."""

    colocated = "colocated"
    disaggregated = "disaggregated"


@dataclass(kw_only=True)
class RatesConfig:
    """What ``workflow=rates`` compares: the same requests at each offered rate, in each case (DejaVu Fig. 12)."""

    offered: list[float] = field(default_factory=list)
    """Requests per second, a Poisson process each; the lowest first."""
    cases: list[RateCase] = field(default_factory=lambda: list(RateCase))
    live: bool = True
    """Serve them on clusters here, beside the simulated runs; false: simulate alone."""


def check_rates(config: Config, *, is_comparing: bool) -> None:
    """The comparison is one that can be made, or there is none. Raises ConfigError naming key, value and limit."""
    rates = config.rates
    if not is_comparing:
        if rates != RatesConfig():
            raise ConfigError(f"rates is for workflow=rates, and the choice is workflow={config.workflow.name.value}")
        return
    _check_lists(rates)
    if config.strategy.mode.value != "disaggregated":
        raise ConfigError(
            f"workflow=rates needs strategy=disaggregated, and the choice is strategy={config.strategy.mode.value}: "
            f"the colocated case has as many stages as both of its pipelines\n{_ADVICE}"
        )
    swapping = config.strategy.swapping.value
    if swapping != "off":
        raise ConfigError(f"strategy.swapping={swapping}: workflow=rates compares without swapping")
    workload = config.workload
    if workload.kind.value not in ("synthetic", "trace") or not workload.ignore_eos or workload.rate:
        raise ConfigError(
            "workflow=rates needs workload=lmsys-like, synthetic or trace with workload.ignore_eos=true and "
            f"workload.rate=0; rates.offered says how fast they come\n{_ADVICE}"
        )
    if any((config.fault.kill, config.fault.stop, config.fault.partition, config.fault.slow)):
        raise ConfigError("fault: workflow=rates compares clusters that are well")
    if config.model.is_shape and rates.live and config.model.compute.value != "modelled":
        raise ConfigError(
            f"model={config.model.kind} is sizes without weights: simulate alone with rates.live=false, or rehearse "
            "with model.compute=modelled"
        )


def _check_lists(rates: RatesConfig) -> None:
    offered = rates.offered
    if not offered or sorted(set(offered)) != offered:
        raise ConfigError(f"rates.offered={offered}: name at least one rate, the lowest first, none twice\n{_ADVICE}")
    if not all(math.isfinite(rate) and 0 < rate <= _MOST_RATE for rate in offered):
        raise ConfigError(f"rates.offered={offered}: each must be above 0 and at most {_MOST_RATE:g} requests/s")
    if not rates.cases or len(set(rates.cases)) < len(rates.cases):
        raise ConfigError("rates.cases: name at least one, and none twice")
