"""Whether the process lives, and whether a request would run."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dejavu.serving.service import Service

_RETRY_AFTER_S = 1


def routes(service: Service) -> list[Route]:
    """``/health`` and ``/ready``."""

    async def health(http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(http: HttpRequest) -> Response:
        reason = service.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        headers = {"Retry-After": str(_RETRY_AFTER_S)}
        return JSONResponse({"status": "not ready", "reason": reason}, 503, headers)

    return [Route("/health", health, methods=["GET"]), Route("/ready", ready, methods=["GET"])]
