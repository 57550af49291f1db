"""Requests out of prompt lines: the user's own file, or the built-in chat set."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path

from dejavu.config import WorkloadConfig
from dejavu.errors import ConfigError
from dejavu.ids import RequestId
from dejavu.request import Request, Sampling
from dejavu.workload.codec import Codec
from dejavu.workload.lines import NumberedLine, PromptLine, read_lines

BUILT_IN_MAX_TOKENS = 64


def built_in_file() -> AbstractContextManager[Path]:
    """The chat prompts that come with the program, as a file."""
    return resources.as_file(resources.files("dejavu.workload") / "chat.jsonl")


def requests_from_lines(
    path: Path, workload: WorkloadConfig, codec: Codec | None, vocab_size: int | None
) -> list[Request]:
    """A request a line, all arriving at 0. One that cannot be served carries its refusal.

    Raises:
        ConfigError: a malformed line, or a text where there is no tokenizer.
    """
    return [
        _request(path, numbered, workload, codec, vocab_size) for numbered in read_lines(path, workload.num_requests)
    ]


def _request(
    path: Path, numbered: NumberedLine, workload: WorkloadConfig, codec: Codec | None, vocab_size: int | None
) -> Request:
    line = numbered.line
    if codec is None and line.prompt_tokens is None:
        raise ConfigError(
            f"{path}:{numbered.number}: the prompt is text, and the model's folder has no tokenizer\n"
            "give prompt_tokens instead, or a folder with a tokenizer"
        )
    tokens = _tokens(line, codec)
    ignore_eos = workload.ignore_eos if line.ignore_eos is None else line.ignore_eos
    return Request(
        id=RequestId(numbered.request_id),
        prompt_tokens=tokens,
        max_tokens=line.max_tokens or workload.max_tokens or BUILT_IN_MAX_TOKENS,
        sampling=Sampling(
            temperature=line.temperature,
            top_p=line.top_p,
            top_k=line.top_k,
            seed=workload.seed if line.seed is None else line.seed,
        ),
        stop=line.stop_strings,
        ignore_eos=ignore_eos,
        prompt_text=_shown_text(line),
        refusal=_refusal(line, tokens, codec.vocab_size if vocab_size is None and codec is not None else vocab_size),
    )


def _is_empty(line: PromptLine) -> bool:
    """A chat template would make tokens even of nothing, so emptiness is judged before it."""
    if line.messages is not None:
        return not any(message.content.strip() for message in line.messages)
    return not (line.prompt or line.prompt_tokens)


def _tokens(line: PromptLine, codec: Codec | None) -> tuple[int, ...]:
    if line.prompt_tokens is not None:
        return line.prompt_tokens
    if codec is None or _is_empty(line):
        return ()
    if line.messages is not None:
        return tuple(codec.encode_chat([{"role": turn.role, "content": turn.content} for turn in line.messages]))
    return tuple(codec.encode(line.prompt or ""))


def _shown_text(line: PromptLine) -> str | None:
    """What a report shows as the prompt: of a chat, its last turn."""
    if line.messages is not None:
        return line.messages[-1].content if line.messages else ""
    return line.prompt


def _refusal(line: PromptLine, tokens: Sequence[int], vocab_size: int | None) -> str | None:
    if not tokens:
        return "the prompt is empty"
    if vocab_size is not None and max(tokens) >= vocab_size:
        return f"token id {max(tokens)} is not in the vocabulary of {vocab_size}"
    return None
