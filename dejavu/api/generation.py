"""From a request to its answer: submitted, followed, told whole or as a stream, given up when its client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dejavu.api.answers import Answer, Choices, Shape, Usage
from dejavu.api.errors import CLIENT_GONE, of_ending, of_submission
from dejavu.api.following import End, Following, Piece, Told
from dejavu.api.hang_up import ClientGone, while_connected
from dejavu.request import Request
from dejavu.serving.service import NotServing, QueueFull, RequestRefused, Service

logger = logging.getLogger(__name__)

_ENCODER = msgspec.json.Encoder()
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as the API was asked for it."""

    request: Request
    shape: Shape
    object_name: str
    model_id: str
    is_stream: bool
    has_usage: bool
    """Whether a stream ends with the usage."""
    created_s: int = field(default_factory=lambda: int(time.time()))

    def answer(
        self,
        choices: Choices,
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> bytes:
        """JSON of a whole answer or of a chunk."""
        return _ENCODER.encode(
            Answer(
                id=self.request.id,
                object=self.object_name,
                created=self.created_s,
                model=self.model_id,
                choices=choices,
                usage=usage,
            )
        )


async def respond(service: Service, http: HttpRequest, asked: Asked) -> Response:
    """The answer. Raises ApiError when the request is not taken, or fails before its first token."""
    following = Following(asyncio.get_running_loop())
    try:
        service.submit(asked.request, following)
    except (RequestRefused, QueueFull, NotServing) as error:
        raise of_submission(error) from error
    try:
        if not asked.is_stream:
            body = await while_connected(http.receive, _whole(asked, following))
            return Response(body, media_type="application/json")
        # Before the first news nothing is sent, so that a failure until then still has a status code of its own.
        news = await while_connected(http.receive, following.news())
    except ClientGone:
        _give_up(service, asked, following)
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        _give_up(service, asked, following)
        raise
    if isinstance(news[0], End):
        _check_ending(news[0])
    return EventStream(service, asked, following, news)


class EventStream(Response):
    """Server-sent events: a chunk for each token that has text, and the end."""

    def __init__(self, service: Service, asked: Asked, following: Following, news: Sequence[Told]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._service = service
        self._asked = asked
        self._following = following
        self._news = news
        self._untold: list[Piece] = []
        """Pieces of which no text was sent."""
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The stream has been sent, or its client has gone and the request is given up."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGone:
            logger.info("the client of %s has gone", self._asked.request.id)
        finally:
            _give_up(self._service, self._asked, self._following)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        opening = self._asked.shape.opening()
        events = self._event(opening) if opening else b""
        news, is_over = self._news, False
        while not is_over:
            events += b"".join(map(self._events_of, news))
            is_over = isinstance(news[-1], End)
            if events or is_over:
                await send({"type": "http.response.body", "body": events, "more_body": not is_over})
            events = b""
            news = news if is_over else await self._following.news()

    def _events_of(self, one: Told) -> bytes:
        if isinstance(one, Piece):
            self._untold.append(one)
            return self._chunk(one.text) if one.text else b""
        error = of_ending(one.line.finish_reason, one.line.error)
        if error is not None:
            return b"data: " + _ENCODER.encode(error.body()) + b"\n\n"
        del self._untold[len(self._untold) - one.num_cut :]
        rest = self._chunk(one.rest, is_last=True) if one.rest or self._untold else b""
        end = self._chunk("", finish_reason=one.line.finish_reason)
        usage = self._event([], Usage.of(one.line)) if self._asked.has_usage else b""
        return rest + end + usage + _DONE

    def _chunk(self, text: str, finish_reason: str | None = None, *, is_last: bool = False) -> bytes:
        """With the tokens of its text; one whose text may yet be cut off waits, unless this is the last text."""
        self._num_sent += len(text)
        pieces = [piece for piece in self._untold if is_last or piece.start < self._num_sent]
        del self._untold[: len(pieces)]
        return self._event(self._asked.shape.chunk(text, pieces, finish_reason))

    def _event(self, choices: Choices, usage: Usage | None = None) -> bytes:
        shown = usage if self._asked.has_usage else msgspec.UNSET
        return b"data: " + self._asked.answer(choices, shown) + b"\n\n"


def _give_up(service: Service, asked: Asked, following: Following) -> None:
    if not following.has_ended:
        service.cancel(asked.request.id, error="its client has gone")


async def _whole(asked: Asked, following: Following) -> bytes:
    pieces: list[Piece] = []
    while True:
        for one in await following.news():
            if isinstance(one, Piece):
                pieces.append(one)
            else:
                _check_ending(one)
                kept = pieces[: len(pieces) - one.num_cut]
                return asked.answer(asked.shape.whole(one.line, kept), Usage.of(one.line))


def _check_ending(end: End) -> None:
    error = of_ending(end.line.finish_reason, end.line.error)
    if error is not None:
        raise error
