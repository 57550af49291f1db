"""A request's JSON as typed fields; what is unknown or unsupported is refused by name, not swallowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from dejavu.api.errors import ApiError, brief
from dejavu.errors import nearest

T = TypeVar("T", bound=msgspec.Struct)

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "metadata": ({},),
    "prediction": (),
    "reasoning_effort": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of the API that are not supported, and the values beside null with which they change nothing."""
_MOST_NAME = 64
"""Of a name's characters, to look for the nearest one: a client may send megabytes of them."""
_MOST_MESSAGE = 200
_MOST_ENTRIES = 10_000
"""Of a list whose entries are looked through, which takes others' time: longer ones are refused by their length."""
_NESTED: Mapping[str, int] = {"messages": 4, "stream_options": 1}
"""Fields with others in them, and how deep: a list of messages, whose content is a list of parts."""


def decode_body(body: bytes, kind: type[T]) -> T:
    """The body's fields. Raises ApiError (400) that names the field, with the nearest valid name of an unknown one."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(fields).__name__}", code="invalid_json")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in fields.keys() - known:
        _check_foreign(name, fields[name], known)
    try:
        return msgspec.convert(
            {name: _without_nulls(fields[name], _NESTED.get(name, 0)) for name in fields.keys() & known}, kind
        )
    except msgspec.ValidationError as error:
        raise _invalid(error) from error


def _without_nulls(value: Any, depth: int) -> Any:
    """Clients send back the messages that they have got, with every field that there might be."""
    match value:
        case dict() if depth:
            return {name: _without_nulls(one, depth - 1) for name, one in value.items() if one is not None}
        case list() if depth and len(value) <= _MOST_ENTRIES:
            return [_without_nulls(one, depth - 1) for one in value]
        case _:
            return value


def _check_foreign(name: str, value: object, known: set[str]) -> None:
    if name not in NEUTRAL:
        message = f"unknown field {brief(name)}; {nearest(name[:_MOST_NAME], known)}"
        raise ApiError(400, message, param=name[:_MOST_NAME], code="unknown_field")
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name]):
        return
    only = " or ".join(msgspec.json.encode(one).decode() for one in NEUTRAL[name])
    hint = f"; only {only} is" if only else ""
    raise ApiError(400, f"{name} is not supported{hint}", param=name, code="unsupported_field")


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """msgspec says ``Expected `int`, got `str` - at `$.max_tokens```, or that a required field is missing."""
    message, _, place = str(error).partition(" - at ")
    if len(message) > _MOST_MESSAGE:
        message = f"{message[:_MOST_MESSAGE]}..."
    path = re.sub(r"^\$\.?", "", place.strip("`")) or None
    missing = re.search(r"missing required field `(\w+)`", message)
    name = missing.group(1) if missing and path is None else path
    where = f"{name}: " if name and not missing else ""
    return ApiError(400, where + message, param=name, code="invalid_type" if not missing else "missing_field")
