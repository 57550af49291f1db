"""Where a declaration may leave it open whether the cluster swaps. Pure."""

from __future__ import annotations

from dejavu.config.bounds import refuse
from dejavu.config.schema import Config, WorkflowName
from dejavu.config.strategy import Swapping

_FIXED = (WorkflowName.streaming, WorkflowName.recovery, WorkflowName.profile)
"""They compare runs, which must not be decided one by one."""


def check_swapping(config: Config) -> None:
    """``strategy.swapping`` means something to the workflow. Raises ConfigError naming what to take instead."""
    swapping, workflow = config.strategy.swapping, config.workflow.name
    if swapping is Swapping.auto and workflow in _FIXED:
        raise refuse("strategy.swapping", "auto", f"workflow={workflow.value} takes on or off")
    if swapping is not Swapping.off and workflow is WorkflowName.simulate:
        raise refuse("strategy.swapping", swapping.value, "workflow=simulate takes simulate.swapping=true")
