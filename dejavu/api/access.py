"""Who may ask."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dejavu.api.errors import ApiError

_GUARDED = "/v1/"


class RequireKey:
    """Everything under ``/v1/`` needs the key as a bearer token; health, readiness and metrics are open."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The request goes on, or is answered with 401."""
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED):
            kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._expected):
                message = "the API key is missing or wrong; give it as Authorization: Bearer KEY"
                await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
