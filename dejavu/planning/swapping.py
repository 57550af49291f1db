"""The rule of microbatch swapping: twice the rows, if bringing their KV back does not take too long (Appendix E)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapInputs:
    """What the rule is asked for. Times and bytes are at least 0, the bandwidth more."""

    rows: int
    """B: rows of a microbatch that is not swapped; a swapped one has 2B."""
    token_time_s: float
    """t: a step through the whole model on one machine; the same for B and for 2B rows."""
    prompt_tokens: int
    """p."""
    num_new_tokens: int
    """N."""
    kv_bytes_per_token: int
    """C: of one token of one row, all layers."""
    pcie_bytes_per_s: float
    """Between the host and the devices of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRule:
    """Both sides of the rule."""

    without_s: float
    """2·N·t: the steps of 2B rows as two microbatches."""
    with_s: float
    """Σ max(t, transf_i) over i from p to N + p: the steps of 2B rows as one, each not shorter than its transfer."""

    @property
    def pays(self) -> bool:
        """Swapping is worth it. False where there are no steps at all."""
        return self.without_s >= self.with_s and self.without_s > 0


def transfer_s(inputs: SwapInputs, num_tokens: int) -> float:
    """transf_i = i·B·C / bandwidth: a microbatch's KV of ``num_tokens`` tokens a row comes back from the host."""
    return num_tokens * inputs.rows * inputs.kv_bytes_per_token / inputs.pcie_bytes_per_s


def swap_rule(inputs: SwapInputs) -> SwapRule:
    """Both sides; the sum is in closed form, so that it takes no longer for a million tokens."""
    first, last = inputs.prompt_tokens, inputs.prompt_tokens + inputs.num_new_tokens
    a_token_s = transfer_s(inputs, 1)
    # The transfer grows with i: up to `hidden` tokens it is no longer than a step, and the step's time counts.
    hidden = last if a_token_s == 0 else min(float(last), inputs.token_time_s / a_token_s)
    num_hidden = max(0, min(last, int(hidden)) - first + 1)
    num_shown = last - first + 1 - num_hidden
    shown_tokens = num_shown * (first + num_hidden + last) / 2
    return SwapRule(
        without_s=2 * inputs.num_new_tokens * inputs.token_time_s,
        with_s=num_hidden * inputs.token_time_s + shown_tokens * a_token_s,
    )
