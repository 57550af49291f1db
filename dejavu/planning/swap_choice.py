"""Whether a cluster should swap: only where its rows do not fit otherwise, and what the rule says of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dejavu.planning.swapping import SwapInputs, SwapRule, swap_rule, transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapChoice:
    """The decision and why."""

    swapping: bool
    reason: str
    rule: SwapRule | None = None
    warning: str | None = None
    """What a person should know before the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapKnown:
    """What the rule can be asked with, for microbatches of as many rows as are wanted."""

    inputs: SwapInputs | None = None
    """None where something is unknown."""
    source: str = ""
    """Which requests the inputs are of and whose times they have, in words."""
    missing: str = "the time of a step (profile) and the bandwidth (cluster.pcie_gbps, or a profile measured here)"
    """What is unknown, where there are no inputs."""


NOTHING_KNOWN = SwapKnown()


def choose_swapping(
    *, rows: int, most_resident: int | None, most_swapped: int | None, known: SwapKnown = NOTHING_KNOWN
) -> SwapChoice:
    """Swapping where microbatches of ``rows`` rows fit the devices in no other way.

    Args:
        most_resident: rows of a microbatch that fit without swapping; None: nothing limits them.
        most_swapped: and with it.
        known: what the rule is asked with.
    """
    if most_resident is None:
        return SwapChoice(swapping=False, reason="no memory of a device is declared that KV would have to fit into")
    if rows <= most_resident:
        return SwapChoice(
            swapping=False, reason=f"KV of all microbatches of {rows} rows fits; {most_resident} rows would, too"
        )
    why = f"microbatches of {rows} rows do not fit without ({most_resident} would)"
    if most_swapped is not None and rows > most_swapped:
        return SwapChoice(swapping=False, reason=f"{why}, nor with swapping ({most_swapped} would)")
    inputs = known.inputs
    if inputs is None:
        return SwapChoice(swapping=True, reason=f"{why}; whether it pays is unknown without {known.missing}")
    # The rule speaks of B rows and of twice as many that are swapped (Appendix E).
    rule = swap_rule(replace(inputs, rows=max(1, rows // 2)))
    sides = f"2Nt is {rule.without_s:.4g} s, with transfers {rule.with_s:.4g} s"
    verdict = "the rule says that it pays" if rule.pays else "the rule says that it does not pay"
    of = f" (for {known.source})" if known.source else ""
    warning = _warning(inputs, rule, most_resident)
    return SwapChoice(
        swapping=True,
        reason=f"{why}; {verdict}{of}: {sides}",
        rule=rule,
        warning=None if warning is None else f"{warning}{of}",
    )


def _warning(inputs: SwapInputs, rule: SwapRule, most_resident: int) -> str | None:
    longest = inputs.prompt_tokens + inputs.num_new_tokens
    last_s = transfer_s(inputs, longest)
    if rule.pays and last_s <= inputs.token_time_s:
        return None
    slow = (
        f"{inputs.rows} rows of {longest} tokens are copied in {last_s:.3g} s, a step takes {inputs.token_time_s:.3g} s"
    )
    if rule.pays:
        return f"the last steps will wait for their KV: {slow}"
    return f"swapping will cost more than it gives: {slow}; {most_resident} rows without swapping would be faster"
