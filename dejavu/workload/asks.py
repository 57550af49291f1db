"""The declared workload as an OpenAI-compatible endpoint is asked: paths and bodies. Needs no tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, takewhile

import msgspec

from dejavu.config import WorkloadConfig, WorkloadKind
from dejavu.request import Request
from dejavu.workload.arrivals import poisson_process, poisson_times
from dejavu.workload.lines import NumberedLine, PromptLine, read_lines
from dejavu.workload.loading import declared_file, load
from dejavu.workload.prompts import BUILT_IN_MAX_TOKENS, built_in_file

logger = logging.getLogger(__name__)

COMPLETIONS, CHAT = "completions", "chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as it is sent, without what the client adds: the model's name, streaming."""

    id: str
    path: str
    """``COMPLETIONS`` or ``CHAT``, below the endpoint's ``/v1/``."""
    body: Mapping[str, object]
    arrival_s: float = 0.0
    """Seconds from the start at which it is due."""


def load_asks(workload: WorkloadConfig, *, vocab_size: int, duration_s: float | None = None) -> list[Ask]:
    """The declared requests in order of arrival, with unique ids.

    Args:
        workload: validated.
        vocab_size: random prompts are token ids below it.
        duration_s: those that are due within so many seconds. With a rate the workload is repeated for as long.

    Raises:
        ConfigError: a file that is missing or malformed.
    """
    asks = list(_from_lines(workload)) if _has_lines(workload.kind) else list(_from_ids(workload, vocab_size))
    rate = workload.rate
    if rate is None:
        return [ask for ask in asks if duration_s is None or ask.arrival_s < duration_s]
    if duration_s is None:
        times_s = poisson_times(len(asks), rate, workload.seed)
        return [replace(ask, arrival_s=time_s) for ask, time_s in zip(asks, times_s, strict=True)]
    due_s = takewhile(lambda time_s: time_s < duration_s, poisson_process(rate, workload.seed))
    return [replace(ask, arrival_s=time_s) for ask, time_s in zip(_repeated(asks), due_s, strict=False)]


def _repeated(asks: Sequence[Ask]) -> Iterator[Ask]:
    """The asks for ever; from the second round on, the ids say which round."""
    for position, ask in zip(count(), cycle(asks), strict=False):
        round_number = position // len(asks)
        yield ask if round_number == 0 else replace(ask, id=f"{ask.id}/{round_number + 1}")


def _has_lines(kind: WorkloadKind) -> bool:
    return kind in (WorkloadKind.chat, WorkloadKind.file)


def _from_lines(workload: WorkloadConfig) -> Iterator[Ask]:
    if workload.kind is WorkloadKind.chat:
        with built_in_file() as path:
            lines = read_lines(path, workload.num_requests)
    else:
        lines = read_lines(declared_file(workload), workload.num_requests)
    for numbered in lines:
        yield _ask(numbered, workload)


def _ask(numbered: NumberedLine, workload: WorkloadConfig) -> Ask:
    line = numbered.line
    seed = workload.seed if line.seed is None else line.seed
    ignore_eos = workload.ignore_eos if line.ignore_eos is None else line.ignore_eos
    body: dict[str, object] = {
        **_prompt(line),
        "max_tokens": line.max_tokens or workload.max_tokens or BUILT_IN_MAX_TOKENS,
        "temperature": line.temperature,
    }
    # Fields that not every endpoint takes are sent only where they say something.
    if line.temperature > 0:
        body["seed"] = seed
    if line.top_p < 1:
        body["top_p"] = line.top_p
    if line.top_k:
        body["top_k"] = line.top_k
    if line.stop_strings:
        body["stop"] = list(line.stop_strings)
    if ignore_eos:
        body["ignore_eos"] = True
    return Ask(id=numbered.request_id, path=COMPLETIONS if line.messages is None else CHAT, body=body)


def _prompt(line: PromptLine) -> dict[str, object]:
    if line.messages is not None:
        return {"messages": [msgspec.to_builtins(turn) for turn in line.messages]}
    return {"prompt": line.prompt if line.prompt_tokens is None else list(line.prompt_tokens)}


def _from_ids(workload: WorkloadConfig, vocab_size: int) -> Iterator[Ask]:
    requests = load(workload, codec=None, vocab_size=vocab_size)
    refused = [request for request in requests if request.refusal is not None]
    if refused:
        logger.warning("%d requests of the workload ask for nothing and are left out", len(refused))
    for request in requests:
        if request.refusal is None:
            yield Ask(id=request.id, path=COMPLETIONS, body=_ids_body(request), arrival_s=request.arrival_s)


def _ids_body(request: Request) -> dict[str, object]:
    body: dict[str, object] = {
        "prompt": list(request.prompt_tokens),
        "max_tokens": request.max_tokens,
        "temperature": request.sampling.temperature,
    }
    return {**body, "ignore_eos": True} if request.ignore_eos else body
