"""What clients ask for, field by field, and the request that it means."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dejavu.api.errors import ApiError, brief
from dejavu.request import Sampling

MOST_TOP_LOGPROBS = 20
MOST_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16
"""What the API promises for completions without ``max_tokens``; a chat answer may fill the model's length."""
_SEED_BITS = 63
_MOST_TOP_K = 2**31 - 1
"""Above every vocabulary, so that a larger one means no more; and workers' messages have no room for any number."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: bool = False


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways of asking share. Null is as good as absent everywhere."""

    model: str | None = None
    """None: the served one."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1: all tokens."""
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    """Of no consequence here."""


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None

    def one_prompt(self, max_length: int) -> str | list[int]:
        """The prompt's text or tokens. Raises ApiError when there are several, or more tokens than may be.

        Not even looked through when there are more: others' streams wait meanwhile.
        """
        prompt: str | Sequence[int | str | list[int]] = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise _several(prompt)
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if len(prompt) > max_length:
            message = f"prompt of {len(prompt)} tokens exceeds the model's max_length {max_length}"
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        tokens = [token for token in prompt if isinstance(token, int)]
        if len(tokens) < len(prompt):
            raise _several(prompt)
        return tokens


def _several(prompt: Sequence[object]) -> ApiError:
    return ApiError(400, f"prompt has {len(prompt)} entries; this server takes one prompt a request", param="prompt")


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def text(self, place: int) -> str:
        """The content as one text. Raises ApiError for parts that are no text."""
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type != "text" or part.text is None:
                name = f"messages[{place}].content"
                raise ApiError(400, f"{name} has a part of type {brief(part.type)}; only text is supported", param=name)
        return "".join(part.text or "" for part in self.content)


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def conversation(self, max_length: int) -> list[dict[str, str]]:
        """The messages as chat templates take them. Raises ApiError when there is none, or one that is no text, or
        more than there may be tokens: each has one at least."""
        if not self.messages:
            raise ApiError(400, "messages is empty", param="messages")
        if len(self.messages) > max_length:
            message = f"messages has {len(self.messages)} entries, which are more tokens than the model's max_length"
            raise ApiError(400, f"{message} {max_length}", param="messages", code="context_length_exceeded")
        return [
            {"role": message.role, "content": message.text(place)} | ({"name": message.name} if message.name else {})
            for place, message in enumerate(self.messages)
        ]


def sampling_of(fields: GenerationFields, *, top_logprobs: int | None, fresh_seed: int) -> Sampling:
    """How tokens are chosen: as the API promises, drawn at temperature 1 unless the client says otherwise.

    Args:
        top_logprobs: None: none are wanted.
        fresh_seed: taken where the client gives none.
    """
    temperature = _within("temperature", fields.temperature, 1.0, least=0.0, most=2.0)
    top_p = _within("top_p", fields.top_p, 1.0, least=0.0, most=1.0)
    if top_p == 0.0:
        raise ApiError(400, "top_p is 0; it must be above 0 and at most 1", param="top_p", code="invalid_value")
    top_k = _within("top_k", fields.top_k, 0, least=-1)
    if fields.seed is not None and not -(2**_SEED_BITS) <= fields.seed < 2**_SEED_BITS:
        raise ApiError(400, f"seed is {fields.seed}; it must fit 64 bits", param="seed", code="invalid_value")
    if temperature == 0.0:
        return Sampling(top_logprobs=top_logprobs)
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=min(max(int(top_k), 0), _MOST_TOP_K),
        seed=fresh_seed if fields.seed is None else fields.seed,
        top_logprobs=top_logprobs,
    )


def stops_of(fields: GenerationFields) -> tuple[str, ...]:
    """The stop strings. Raises ApiError for an empty one, or too many."""
    stop = fields.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"stop has {len(stops)} strings; at most {MOST_STOPS} are taken", param="stop")
    if "" in stops:
        raise ApiError(400, "stop has an empty string in it", param="stop")
    return stops


def check_generation(fields: GenerationFields, model_id: str) -> None:
    """The fields that have few right values have them. Raises ApiError."""
    if fields.model is not None and fields.model != model_id:
        message = f"the model {brief(fields.model)} does not exist here; {model_id!r} does"
        raise ApiError(404, message, param="model", code="model_not_found")
    if fields.n not in (None, 1):
        raise ApiError(400, f"n is {fields.n}; only 1 is supported", param="n", code="unsupported_value")
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options is for stream=true", param="stream_options")


def max_tokens_of(values: Sequence[tuple[str, int | None]], default: int) -> int:
    """The most new tokens out of the fields that may say so. Raises ApiError when they contradict each other."""
    given = [(name, value) for name, value in values if value is not None]
    if len({value for _, value in given}) > 1:
        raise ApiError(400, " but ".join(f"{name} is {value}" for name, value in given), param=given[0][0])
    for name, value in given:
        _within(name, value, 0, least=1)
    return given[0][1] if given else default


def top_logprobs_of(name: str, value: int | None) -> int | None:
    """As many as are asked for. Raises ApiError outside of the limits."""
    return None if value is None else int(_within(name, value, 0, least=0, most=MOST_TOP_LOGPROBS))


def _within(name: str, value: float | None, default: float, *, least: float, most: float | None = None) -> float:
    if value is None:
        return default
    if value < least or (most is not None and value > most):
        limit = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
        raise ApiError(400, f"{name} is {value}; it must be {limit}", param=name, code="invalid_value")
    return value
