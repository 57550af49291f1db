"""From the declared workload to requests."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from dejavu.config import BadLines, WorkloadConfig, WorkloadKind
from dejavu.config.paths import require_file
from dejavu.errors import ConfigError
from dejavu.ids import RequestId
from dejavu.request import Request
from dejavu.workload.arrivals import poisson_times, with_arrivals
from dejavu.workload.codec import Codec
from dejavu.workload.lines import read_lines
from dejavu.workload.prompts import built_in_file, requests_from_lines
from dejavu.workload.synthetic import TokenSource, new_tokens
from dejavu.workload.traces import Trace, read_trace

logger = logging.getLogger(__name__)


def check(workload: WorkloadConfig) -> None:
    """The declared file exists and is well formed as far as it will be read. Needs no model.

    Raises:
        ConfigError: naming the path, and the line where one is malformed.
    """
    if workload.kind is WorkloadKind.file:
        read_lines(declared_file(workload), workload.num_requests)
    elif workload.kind is WorkloadKind.trace:
        _trace(workload)


def load(
    workload: WorkloadConfig,
    *,
    codec: Codec | None,
    vocab_size: int | None = None,
    avoid: Collection[int] = (),
) -> list[Request]:
    """The declared requests in order of arrival, with unique ids.

    Args:
        workload: validated.
        codec: makes token ids of text; None where the model has no tokenizer.
        vocab_size: the model's number of token ids; None: the codec's.
        avoid: special ids, never drawn for random prompts.

    Raises:
        ConfigError: a file that is missing or malformed; text without a codec.
    """
    requests = _requests(workload, codec, vocab_size, avoid)
    if workload.rate is None:
        return requests
    return with_arrivals(requests, poisson_times(len(requests), workload.rate, workload.seed))


def _requests(
    workload: WorkloadConfig, codec: Codec | None, vocab_size: int | None, avoid: Collection[int]
) -> list[Request]:
    match workload.kind:
        case WorkloadKind.chat:
            with built_in_file() as path:
                return requests_from_lines(path, workload, codec, vocab_size)
        case WorkloadKind.file:
            return requests_from_lines(declared_file(workload), workload, codec, vocab_size)
        case WorkloadKind.synthetic:
            return _synthetic(workload, _token_source(workload, codec, vocab_size, avoid))
        case WorkloadKind.trace:
            return _from_trace(workload, _token_source(workload, codec, vocab_size, avoid))


def declared_file(workload: WorkloadConfig) -> Path:
    """The file that the workload names. Raises ConfigError where there is none."""
    if workload.path is None:
        raise ConfigError(f"workload={workload.kind.value} needs workload.path=FILE")
    path = Path(workload.path)
    require_file("workload.path", path)
    return path


def _token_source(
    workload: WorkloadConfig, codec: Codec | None, vocab_size: int | None, avoid: Collection[int]
) -> TokenSource:
    size = vocab_size if vocab_size is not None else codec.vocab_size if codec is not None else None
    if size is None:
        raise ValueError("random prompts need vocab_size or a codec")
    return TokenSource(size, avoid, workload.seed)


def _synthetic(workload: WorkloadConfig, source: TokenSource) -> list[Request]:
    num_requests, prompt_tokens, max_tokens = workload.num_requests, workload.prompt_tokens, workload.max_tokens
    if num_requests is None or prompt_tokens is None or max_tokens is None:
        raise ConfigError("workload=synthetic needs workload.num_requests, .prompt_tokens and .max_tokens")
    lengths = new_tokens(num_requests, max_tokens, workload.median_tokens, workload.sigma, workload.seed)
    return [
        Request(
            id=RequestId(f"synthetic-{index}"),
            prompt_tokens=source.draw(index, prompt_tokens),
            max_tokens=length,
            ignore_eos=workload.ignore_eos,
        )
        for index, length in enumerate(lengths)
    ]


def _trace(workload: WorkloadConfig) -> Trace:
    return read_trace(declared_file(workload), workload.num_requests, skip_bad=workload.bad_lines is BadLines.skip)


def _told(trace: Trace) -> Trace:
    """The trace; that lines of it were left out is in the log and on the terminal."""
    if trace.complaint is not None:
        logger.warning("%s", trace.complaint)
    return trace


def trace_lengths(workload: WorkloadConfig) -> list[tuple[int, int]]:
    """Prompt and new tokens of each entry that asks for both, cut to the declared most. Raises ConfigError."""
    return [
        (_capped(entry.prompt_tokens, workload.prompt_tokens), _capped(entry.output_tokens, workload.max_tokens))
        for entry in _told(_trace(workload)).entries
        if _refusal(entry.prompt_tokens, entry.output_tokens) is None
    ]


def _from_trace(workload: WorkloadConfig, source: TokenSource) -> list[Request]:
    return [
        Request(
            id=RequestId(f"trace-{index}"),
            prompt_tokens=source.draw(index, _capped(entry.prompt_tokens, workload.prompt_tokens)),
            max_tokens=_capped(entry.output_tokens, workload.max_tokens),
            ignore_eos=workload.ignore_eos,
            arrival_s=entry.arrival_s,
            refusal=_refusal(entry.prompt_tokens, entry.output_tokens),
        )
        for index, entry in enumerate(_told(_trace(workload)).entries)
    ]


def _capped(length: int, most: int | None) -> int:
    return length if most is None else min(length, most)


def _refusal(prompt_tokens: int, output_tokens: int) -> str | None:
    if prompt_tokens == 0:
        return "the prompt is empty"
    return "the trace asks for no token" if output_tokens == 0 else None
