"""The paper's formulas for cutting machines between prompts and tokens (DejaVu §4.2.1, Appendix E). Total functions.

The letters are the paper's: D machines of M bytes, L layers, per layer W0 bytes of weights, C0 of a microbatch's
prompt KV and K0 of its token KV; Y and t, the seconds of a microbatch's prompts and of one of its steps through the
whole model on one machine; N new tokens; m, the streaming overhead. Inverse throughputs are seconds per round of D
microbatches; a stage of a pipeline of depth d takes Y/d or t/d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the formulas are evaluated for. Raises ValueError for what no formula covers, NaN and infinity included."""

    num_machines: int
    """D."""
    num_layers: int
    """L."""
    machine_memory_bytes: int | None
    """M, of all devices of a machine; None: no limit."""
    layer_weight_bytes: int
    """W0."""
    prompt_kv_bytes: int
    """C0."""
    token_kv_bytes: int
    """K0."""
    prompt_time_s: float
    """Y."""
    token_time_s: float
    """t."""
    num_new_tokens: float
    """N, the mean of the workload."""
    streaming_overhead: float = 1.0
    """m."""

    def __post_init__(self) -> None:
        limits = {
            "num_machines": 1,
            "num_layers": 1,
            "layer_weight_bytes": 0,
            "prompt_kv_bytes": 0,
            "token_kv_bytes": 0,
            "prompt_time_s": 0,
            "token_time_s": 0,
            "num_new_tokens": 0,
            "streaming_overhead": 1,
        }
        for name, least in limits.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name}={value}: must be at least {least}")
        if self.machine_memory_bytes is not None and self.machine_memory_bytes < 1:
            raise ValueError(f"machine_memory_bytes={self.machine_memory_bytes}: must be at least 1")

    @property
    def tokens_time_s(self) -> float:
        """N·t: all steps of a microbatch on one machine."""
        return self.num_new_tokens * self.token_time_s


def min_prompt_depth(inputs: Inputs) -> int:
    """Fewest prompt machines whose memory holds the weights and a prompt microbatch's KV in each stage; at least 1."""
    if inputs.machine_memory_bytes is None:
        return 1
    total = inputs.num_layers * (inputs.prompt_kv_bytes + inputs.layer_weight_bytes)
    return max(1, _ceil_ratio(total, inputs.machine_memory_bytes))


def min_token_depth(inputs: Inputs) -> int | None:
    """Fewest token machines; None where the KV alone takes a machine's memory, however many there are.

    A pipeline of depth d keeps d microbatches in flight, so that its KV takes L(C0 + K0) of every machine.
    """
    if inputs.machine_memory_bytes is None:
        return 1
    left = inputs.machine_memory_bytes - inputs.num_layers * (inputs.prompt_kv_bytes + inputs.token_kv_bytes)
    if left <= 0:
        return None
    return max(1, _ceil_ratio(inputs.num_layers * inputs.layer_weight_bytes, left))


def min_swapping_depth(inputs: Inputs) -> int:
    """Fewest machines of a pipeline whose devices hold KV for two microbatches, and the host for all; at least 1."""
    if inputs.machine_memory_bytes is None:
        return 1
    kv_bytes = 2 * (inputs.prompt_kv_bytes + inputs.token_kv_bytes)
    return max(1, _ceil_ratio(inputs.num_layers * (inputs.layer_weight_bytes + kv_bytes), inputs.machine_memory_bytes))


def colocated_s(inputs: Inputs) -> float:
    """I_c. Where t > Y it falls below what the stages have to compute; ``colocated_round_s`` does not."""
    num_machines, prompt_s, token_s = inputs.num_machines, inputs.prompt_time_s, inputs.token_time_s
    return (num_machines - 1) * (prompt_s - token_s) / num_machines + prompt_s + inputs.tokens_time_s


def colocated_round_s(inputs: Inputs) -> float:
    """I_c, and at least Y + N·t, the work that every stage has in a round."""
    return max(colocated_s(inputs), inputs.prompt_time_s + inputs.tokens_time_s)


def prompt_pipeline_s(inputs: Inputs, prompt_depth: int) -> float:
    """I_p of ``prompt_depth`` >= 1 machines."""
    return inputs.num_machines * inputs.streaming_overhead * inputs.prompt_time_s / prompt_depth


def token_pipeline_s(inputs: Inputs, token_depth: int) -> float:
    """I_t of ``token_depth`` >= 1 machines."""
    return inputs.num_machines * inputs.tokens_time_s / token_depth


def disaggregated_s(inputs: Inputs, prompt_depth: int, token_depth: int) -> float:
    """I_dis: the slower pipeline's."""
    return max(prompt_pipeline_s(inputs, prompt_depth), token_pipeline_s(inputs, token_depth))


def equal_split(inputs: Inputs) -> tuple[float, float] | None:
    """The depths, in fractions of machines, at which I_p = I_t; None where nothing takes any time."""
    prompt_s = inputs.streaming_overhead * inputs.prompt_time_s
    both_s = prompt_s + inputs.tokens_time_s
    if both_s == 0:
        return None
    return inputs.num_machines * prompt_s / both_s, inputs.num_machines * inputs.tokens_time_s / both_s


def ratio(inputs: Inputs) -> float | None:
    """Y/t; None where t is 0 or so small that the quotient is no number."""
    if inputs.token_time_s == 0:
        return None
    quotient = inputs.prompt_time_s / inputs.token_time_s
    return quotient if math.isfinite(quotient) else None


def threshold(inputs: Inputs) -> float | None:
    """What Y/t must exceed for a split to pay; None where D(2 − m) − 1 <= 0, and none can."""
    margin = _margin(inputs)
    return (inputs.num_machines - 1) / margin if margin > 0 else None


def may_pay(inputs: Inputs) -> bool:
    """Y/t exceeds the threshold, told without dividing: no split pays where this is false."""
    margin = _margin(inputs)
    return margin > 0 and inputs.prompt_time_s * margin > (inputs.num_machines - 1) * inputs.token_time_s


def _margin(inputs: Inputs) -> float:
    return inputs.num_machines * (2 - inputs.streaming_overhead) - 1


def _ceil_ratio(numerator: int, denominator: int) -> int:
    """Of whole numbers, exactly: bytes of big models lie beyond what a float tells apart."""
    return -(-numerator // denominator)
