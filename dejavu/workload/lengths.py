"""How long the declared requests are, without making their tokens: all that a plan needs of a workload."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.config import WorkloadConfig, WorkloadKind
from dejavu.errors import ConfigError
from dejavu.workload.codec import Codec
from dejavu.workload.loading import load, trace_lengths
from dejavu.workload.synthetic import new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLength:
    """One request's tokens. ``new`` is its limit where the answer's end is not known."""

    prompt: int
    new: int


def request_lengths(workload: WorkloadConfig, codec: Codec | None, vocab_size: int) -> list[RequestLength]:
    """A length for each request that can be served, in order of arrival.

    Args:
        workload: validated.
        codec: makes token ids of text; None where the model has no tokenizer.
        vocab_size: the model's number of token ids.

    Raises:
        ConfigError: a file that is missing or malformed; text without a codec; no request that can be served.
    """
    match workload.kind:
        case WorkloadKind.synthetic:
            lengths = _synthetic(workload)
        case WorkloadKind.trace:
            lengths = [RequestLength(prompt=prompt, new=new) for prompt, new in trace_lengths(workload)]
        case WorkloadKind.chat | WorkloadKind.file:
            requests = load(workload, codec=codec, vocab_size=vocab_size)
            served = [request for request in requests if request.refusal is None]
            lengths = [RequestLength(prompt=len(one.prompt_tokens), new=one.max_tokens) for one in served]
    if not lengths:
        raise ConfigError(f"workload={workload.kind.value} has no request in it that can be served")
    return lengths


def _synthetic(workload: WorkloadConfig) -> list[RequestLength]:
    num_requests, prompt, new = workload.num_requests, workload.prompt_tokens, workload.max_tokens
    if num_requests is None or prompt is None or new is None:
        raise ConfigError("workload=synthetic needs workload.num_requests, .prompt_tokens and .max_tokens")
    lengths = new_tokens(num_requests, new, workload.median_tokens, workload.sigma, workload.seed)
    return [RequestLength(prompt=prompt, new=length) for length in lengths]
