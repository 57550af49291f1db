"""What swapping promises over sequence lengths: throughput with and without it, and where it stops paying. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dejavu.planning.costs import Costs
from dejavu.planning.swapping import SwapInputs, SwapRule, swap_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapQuestion:
    """A pipeline whose microbatches have B rows, or 2B rows that are swapped."""

    costs: Costs
    depth: int
    """Stages, and microbatches in flight."""
    rows: int
    """B."""
    prompt_tokens: int
    kv_bytes_per_token: int
    """Of one row, all layers."""
    pcie_bytes_per_s: float
    moved_rows: int | None = None
    """Rows whose KV comes back in a step: those of the swapped microbatch; None: B, as the rule's letter has it."""

    def rule(self, length: int) -> SwapRule:
        """Both sides of the rule for requests of ``length`` tokens, prompt and answer together."""
        new_tokens = length - self.prompt_tokens
        return swap_rule(
            SwapInputs(
                rows=self.moved_rows or self.rows,
                token_time_s=self.costs.step_time_s(self.rows, self.prompt_tokens + new_tokens / 2),
                prompt_tokens=self.prompt_tokens,
                num_new_tokens=new_tokens,
                kv_bytes_per_token=self.kv_bytes_per_token,
                pcie_bytes_per_s=self.pcie_bytes_per_s,
            )
        )

    def promised(self, length: int) -> tuple[float, float]:
        """New tokens per second without and with swapping: 2P + 2N·t, and 2P + the rule's sum, for 2B rows."""
        rule, prompt_s = self.rule(length), self.costs.prompt_time_s(self.rows, self.prompt_tokens)
        tokens = 2 * self.rows * self.depth * (length - self.prompt_tokens)
        return tokens / (2 * prompt_s + rule.without_s), tokens / (2 * prompt_s + rule.with_s)

    def longest_paying(self, most: int) -> int | None:
        """The longest requests, up to ``most`` tokens, for which the rule says to swap; None: it never does."""
        lengths = range(most, self.prompt_tokens, -1)
        return next((length for length in lengths if self.rule(length).pays), None)


def slower_from(lengths: Sequence[float], gains: Sequence[float]) -> float | None:
    """From which length on the gain of swapping is below 1, between the ascending lengths around it.

    The first of them where it is below 1 at all of them, and may be so before; None where the longest still gains.
    """
    if not gains or gains[-1] >= 1:
        return None
    gaining = [index for index, gain in enumerate(gains) if gain >= 1]
    if not gaining:
        return lengths[0]
    last = gaining[-1]
    (length, next_length), (gain, next_gain) = lengths[last : last + 2], gains[last : last + 2]
    return length + (next_length - length) * (gain - 1) / (gain - next_gain)
