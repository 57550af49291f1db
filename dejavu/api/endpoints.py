"""The paths under ``/v1``: what was asked for becomes a request, and its answer is sent."""

from __future__ import annotations

import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dejavu.api import schema
from dejavu.api.answers import ChatShape, CompletionShape
from dejavu.api.errors import ApiError
from dejavu.api.fields import decode_body
from dejavu.api.generation import Asked, respond
from dejavu.api.served import ServedModel
from dejavu.errors import ConfigError
from dejavu.ids import RequestId
from dejavu.models.tokenizer import TextCodec
from dejavu.request import Request
from dejavu.serving.service import Service

MOST_BODY_BYTES = 16 * 2**20
_SEED_BITS = 63


class Endpoints:
    """Answers of one service. On the event loop; tokenizing is done beside it."""

    def __init__(self, service: Service, model: ServedModel) -> None:
        self._service = service
        self._model = model
        self._most_characters = 0 if model.codec is None else model.codec.most_characters(model.max_length)

    def routes(self) -> list[Route]:
        """Where they are."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
        ]

    async def models(self, http: HttpRequest) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model.card()]})

    async def model(self, http: HttpRequest) -> Response:
        """One model by its name."""
        name = http.path_params["model"]
        if name != self._model.id:
            message = f"the model {name!r} does not exist here; {self._model.id!r} does"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._model.card())

    async def completions(self, http: HttpRequest) -> Response:
        """A prompt goes on."""
        return await self._answer(http, self._completion(http))

    async def chat_completions(self, http: HttpRequest) -> Response:
        """A conversation goes on."""
        return await self._answer(http, self._chat_completion(http))

    async def _answer(self, http: HttpRequest, reading: Coroutine[Any, Any, Asked]) -> Response:
        try:
            asked = await reading
        except ApiError:
            self._service.refused()
            raise
        return await respond(self._service, http, asked)

    async def _completion(self, http: HttpRequest) -> Asked:
        fields = decode_body(await _body(http), schema.CompletionFields)
        schema.check_generation(fields, self._model.id)
        prompt, top = fields.one_prompt(self._model.max_length), schema.top_logprobs_of("logprobs", fields.logprobs)
        limit = schema.max_tokens_of([("max_tokens", fields.max_tokens)], schema.DEFAULT_COMPLETION_TOKENS)
        if isinstance(prompt, str):
            codec = self._codec("prompt as text")
            self._check_length("prompt", prompt)
            tokens: Sequence[int] = await run_in_threadpool(codec.encode, prompt)
        else:
            tokens = prompt
        shape = CompletionShape(codec=self._model.codec, has_logprobs=top is not None)
        text = prompt if isinstance(prompt, str) else None
        request = self._request(fields, "cmpl", tokens, limit, top, text)
        return self._asked(fields, request, shape, "text_completion")

    async def _chat_completion(self, http: HttpRequest) -> Asked:
        fields = decode_body(await _body(http), schema.ChatFields)
        schema.check_generation(fields, self._model.id)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        wanted = schema.top_logprobs_of("top_logprobs", fields.top_logprobs)
        top = (wanted or 0) if fields.logprobs else None
        tokens = await run_in_threadpool(self._encode_chat, fields)
        limit = schema.max_tokens_of(
            [("max_completion_tokens", fields.max_completion_tokens), ("max_tokens", fields.max_tokens)],
            max(self._model.max_length - len(tokens), 1),
        )
        shape = ChatShape(codec=self._model.codec, has_logprobs=top is not None)
        request = self._request(fields, "chatcmpl", tokens, limit, top, None)
        name = "chat.completion.chunk" if fields.stream else "chat.completion"
        return self._asked(fields, request, shape, name)

    def _asked(
        self,
        fields: schema.GenerationFields,
        request: Request,
        shape: CompletionShape | ChatShape,
        object_name: str,
    ) -> Asked:
        options = fields.stream_options
        return Asked(
            request=request,
            shape=shape,
            object_name=object_name,
            model_id=self._model.id,
            is_stream=bool(fields.stream),
            has_usage=options is not None and options.include_usage,
        )

    def _request(
        self,
        fields: schema.GenerationFields,
        prefix: str,
        tokens: Sequence[int],
        max_tokens: int,
        top_logprobs: int | None,
        text: str | None,
    ) -> Request:
        return Request(
            id=RequestId(f"{prefix}-{secrets.token_hex(12)}"),
            prompt_tokens=tuple(tokens),
            max_tokens=max_tokens,
            sampling=schema.sampling_of(fields, top_logprobs=top_logprobs, fresh_seed=secrets.randbits(_SEED_BITS)),
            stop=self._stops(fields),
            ignore_eos=bool(fields.ignore_eos),
            prompt_text=text,
        )

    def _stops(self, fields: schema.GenerationFields) -> tuple[str, ...]:
        stops = schema.stops_of(fields)
        if stops:
            self._codec("stop")
        return stops

    def _encode_chat(self, fields: schema.ChatFields) -> list[int]:
        codec = self._codec("messages")
        if not codec.has_chat_template:
            message = f"the model {self._model.id!r} has no chat template; give a prompt to /v1/completions instead"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        try:
            text = codec.chat_text(fields.conversation(self._model.max_length))
        except ConfigError as error:
            message = f"the model's chat template refuses the messages: {error.__cause__}"
            raise ApiError(400, message, param="messages", code="invalid_value") from error
        self._check_length("messages", text)
        return codec.encode_chat_text(text)

    def _check_length(self, param: str, text: str) -> None:
        """A text that cannot fit is refused before it is tokenized, which may take long."""
        num_characters, limit = len(text), self._model.max_length
        if num_characters > self._most_characters:
            message = (
                f"{param} has {num_characters} characters, which are more tokens than the model's max_length {limit}"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _codec(self, wanted: str) -> TextCodec:
        if self._model.codec is None:
            message = f"the model {self._model.id!r} has no tokenizer, which {wanted} needs; give prompt as token ids"
            raise ApiError(400, message, param="prompt", code="no_tokenizer")
        return self._model.codec


async def _body(http: HttpRequest) -> bytes:
    """The request's body. Raises ApiError (413) when it is too long, without reading all of it."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MOST_BODY_BYTES} bytes", code="body_too_large")
    return bytes(body)
