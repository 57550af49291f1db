"""How well a rehearsal kept to its times, in a line for people, and a warning where it did not."""

from __future__ import annotations

import logging

from dejavu.report.amounts import show_seconds
from dejavu.report.metrics import Metrics, Rehearsal

logger = logging.getLogger(__name__)

_TOLERATED = 0.02
"""Share of the planned time by which passes may end too late."""


def rehearsal_line(rehearsal: Rehearsal) -> str:
    """What was waited for and by how much it was late."""
    share = rehearsal["late_share"] or 0.0
    return (
        f"times × {rehearsal['time_scale']:.3g}, KV × {rehearsal['kv_scale']:.3g}; {rehearsal['passes']:,} passes of "
        f"{show_seconds(rehearsal['planned_s'])} together, late by {share:.1%}, at most "
        f"{show_seconds(rehearsal['most_late_s'])}"
    )


def is_too_late(rehearsal: Rehearsal) -> bool:
    """This machine could not keep up."""
    return (rehearsal["late_share"] or 0.0) > _TOLERATED


def log_rehearsal(metrics: Metrics) -> None:
    """A rehearsal's account is in the log, as a warning where this machine could not keep up."""
    rehearsal = metrics["rehearsal"]
    if rehearsal is None:
        return
    logger.info("rehearsal: %s", rehearsal_line(rehearsal))
    if is_too_late(rehearsal):
        logger.warning(
            "this machine could not keep up with the rehearsal: passes ended %.1f %% too late; raise model.time_scale, "
            "or lower model.kv_scale",
            100 * (rehearsal["late_share"] or 0.0),
        )
