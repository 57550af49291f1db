"""What a plan is asked for: machines, model, workload and times, in the planner's own words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dejavu.control.plan import Scheduling
from dejavu.planning.arithmetic import Inputs
from dejavu.planning.shape import ModelShape
from dejavu.planning.swapping import SwapInputs
from dejavu.planning.times import Times

SwappingWish: TypeAlias = Literal["off", "auto", "on"]
"""Never; where rows do not fit otherwise; always."""
_BITS = 8
_GIGA = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines that the user declares, all alike."""

    count: int
    devices_each: int = 1
    device_memory_bytes: int | None = None
    """Of one device; None: no limit is checked."""
    host_memory_bytes: int | None = None
    """Of a machine's host, for KV that is swapped; None: no limit is checked."""
    link_gbps: float | None = None
    """Between two machines, in Gbit/s; None: unknown."""
    pcie_gbps: float | None = None
    """Between host and devices of a machine, in Gbit/s; None: unknown, and swapping is not considered."""
    price_per_hour: float | None = None
    """Of one machine, in any currency; None: unknown."""

    @property
    def memory_bytes(self) -> int | None:
        """M: of all devices of one machine."""
        return None if self.device_memory_bytes is None else self.device_memory_bytes * self.devices_each

    @property
    def pcie_bytes_per_s(self) -> float | None:
        """Between the host and the devices of one machine."""
        return None if self.pcie_gbps is None else self.pcie_gbps * _GIGA / _BITS

    @property
    def link_bytes_per_s(self) -> float | None:
        """Between two machines."""
        return None if self.link_gbps is None else self.link_gbps * _GIGA / _BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the workload's prompts and answers are: means decide the times, maxima the memory."""

    num_requests: int
    mean_prompt_tokens: float
    max_prompt_tokens: int
    mean_new_tokens: float
    """N: every token of an answer counts, also the one that the prompt's own computation gives."""
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that decides a plan."""

    machines: Machines
    shape: ModelShape
    lengths: Lengths
    times: Times
    rows: int
    """B: rows of a microbatch."""
    streaming_overhead: float | None = None
    """m; None: what the link leaves exposed, or 1 where it is unknown."""
    most_rows: int | None = None
    """No microbatch may have more, a swapped one included; None: a swapped one may have 2B."""
    prompt_rows: int | None = None
    """Most rows of a prompt microbatch, for the memory that they take; None: B."""
    scheduling: Scheduling = "row"
    """How the cluster replaces rows, which decides how many token microbatches it keeps."""
    swapping: SwappingWish = "auto"
    declared_length: int | None = None
    """Positions of a row in a cluster that is not told those of the plan (``shape.max_length``); None: it is told."""

    def prompt_rows_of(self, rows: int) -> int:
        """Rows of a prompt microbatch, beside token microbatches of ``rows``."""
        return rows if self.prompt_rows is None else min(rows, self.prompt_rows)

    def inputs(self, rows: int, num_machines: int) -> Inputs:
        """The formulas' letters for microbatches of ``rows`` rows on ``num_machines`` machines."""
        lengths, position_bytes = self.lengths, self.shape.position_bytes
        prompt_s = self.times.costs.prompt_time_s(rows, lengths.mean_prompt_tokens)
        return Inputs(
            num_machines=num_machines,
            num_layers=self.shape.num_layers,
            machine_memory_bytes=self.machines.memory_bytes,
            layer_weight_bytes=self.shape.layer_weight_bytes,
            prompt_kv_bytes=rows * lengths.max_prompt_tokens * position_bytes,
            token_kv_bytes=rows * lengths.max_new_tokens * position_bytes,
            prompt_time_s=prompt_s,
            token_time_s=self.times.costs.step_time_s(rows, self.mean_context),
            num_new_tokens=lengths.mean_new_tokens,
            streaming_overhead=self._overhead(rows, prompt_s),
        )

    @property
    def mean_context(self) -> float:
        """Tokens behind a row in a step: it grows from the prompt on, by half of the answer in the mean."""
        return self.lengths.mean_prompt_tokens + self.lengths.mean_new_tokens / 2

    def swap_inputs(self, rows: int) -> SwapInputs | None:
        """What is asked of microbatches whose ``rows`` rows are moved; None: the bandwidth to the host is unknown."""
        bandwidth = self.machines.pcie_bytes_per_s
        if bandwidth is None:
            return None
        return SwapInputs(
            rows=rows,
            token_time_s=self.inputs(rows, self.machines.count).token_time_s,
            prompt_tokens=round(self.lengths.mean_prompt_tokens),
            num_new_tokens=round(self.lengths.mean_new_tokens),
            kv_bytes_per_token=self.shape.kv_bytes_per_token,
            pcie_bytes_per_s=bandwidth,
        )

    def handoff_s(self, rows: int) -> float | None:
        """The KV of a microbatch's prompts over one link, all layers; None where the link is unknown."""
        bandwidth = self.machines.link_bytes_per_s
        if bandwidth is None:
            return None
        return rows * self.lengths.mean_prompt_tokens * self.shape.kv_bytes_per_token / bandwidth

    def _overhead(self, rows: int, prompt_s: float) -> float:
        """m: given, or by how much sending a microbatch's KV outlasts computing it.

        Every prompt machine has a link and sends its own layers while it computes, so that the depth cancels out.
        """
        if self.streaming_overhead is not None:
            return self.streaming_overhead
        handoff_s = self.handoff_s(rows)
        if handoff_s is None or prompt_s == 0:
            return 1.0
        overhead = handoff_s / prompt_s
        return max(1.0, overhead) if math.isfinite(overhead) else 1.0
