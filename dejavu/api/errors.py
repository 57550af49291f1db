"""Errors as the API tells them: a status code and an object that its clients know."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from dejavu.serving.service import NotServing, QueueFull, RequestRefused

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""What nginx calls it; no client reads it."""
_MOST_QUOTED = 64
_RETRY_AFTER_S = 5
"""When the service cannot say itself: a repair takes about as long."""


def brief(value: str) -> str:
    """What a client has sent, quoted, to name it in an answer; of a long one the beginning."""
    return repr(value if len(value) <= _MOST_QUOTED else f"{value[:_MOST_QUOTED]}...")


class ApiError(Exception):
    """What a client did wrong, or what it cannot have now."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The object that the client gets."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def unavailable(message: str, retry_after_s: int = _RETRY_AFTER_S) -> ApiError:
    """Not now: 503."""
    return ApiError(503, message, kind="server_error", code="service_unavailable", retry_after_s=retry_after_s)


def of_submission(error: RequestRefused | QueueFull | NotServing) -> ApiError:
    """Why the service did not take a request."""
    match error:
        case QueueFull():
            return ApiError(
                429, str(error), kind="rate_limit_error", code="queue_full", retry_after_s=error.retry_after_s
            )
        case NotServing():
            return unavailable(str(error))
        case RequestRefused():
            code = "context_length_exceeded" if "max_length" in str(error) else "invalid_value"
            return ApiError(400, str(error), code=code)


def of_ending(finish_reason: str, error: str | None) -> ApiError | None:
    """Why a request ended without its answer; None when it did not."""
    match finish_reason:
        case "stop" | "length":
            return None
        case "timeout":
            return ApiError(504, error or "the deadline passed", kind="server_error", code="timeout")
        case "abort":
            return unavailable(error or "the request was aborted")
        case _:
            return ApiError(500, error or "the request failed", kind="server_error", code="failed")


async def tell_api_error(request: HttpRequest, error: Exception) -> Response:
    """The answer to an ``ApiError``."""
    assert isinstance(error, ApiError)
    return error.response()


async def tell_http_error(request: HttpRequest, error: Exception) -> Response:
    """The answer where no route fits path or method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = {404: f"there is no {path} here", 405: f"{request.method} is not for {path}"}.get(
        error.status_code, error.detail
    )
    response = ApiError(error.status_code, message, code="unknown_url" if error.status_code == 404 else None).response()
    response.headers.update(error.headers or {})
    return response


async def tell_client_gone(request: HttpRequest, error: Exception) -> Response:
    """For a client that hung up before its whole request was there; nobody reads it."""
    logger.info("%s %s: its client has gone", request.method, request.url.path)
    return Response(status_code=CLIENT_GONE)


async def tell_fault(request: HttpRequest, error: Exception) -> Response:
    """The answer to our own mistakes; the traceback is in the log."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, "internal error; the server's log says more", kind="server_error", code="internal").response()
