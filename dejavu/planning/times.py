"""The times that a plan is made from, and what is to be said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dejavu.planning.costs import Costs
from dejavu.planning.interpolation import HeldOut, PointCosts, held_out_error
from dejavu.planning.profile_file import Profile, ProfileFile, profile_costs

TimesKind: TypeAlias = Literal["measured", "published", "roofline", "given"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Costs and their origin."""

    kind: TimesKind
    costs: Costs
    licence: str | None = None
    held_out: HeldOut | None = None
    """Of times that are interpolated."""
    copy_bytes_per_s: float | None = None
    """KV from the host to the device, where it was measured."""


def times_of_profile(kind: TimesKind, file: ProfileFile, profile: Profile) -> Times:
    """Times out of a profile. Raises ConfigError for one without times."""
    costs = profile_costs(file, profile)
    return Times(
        kind=kind,
        costs=costs,
        licence=file.licence,
        held_out=held_out_error(costs) if isinstance(costs, PointCosts) else None,
        copy_bytes_per_s=profile.copy_bytes_per_s,
    )
