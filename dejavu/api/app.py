"""The application: every path of the interface, behind its key."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute

from dejavu.api import health
from dejavu.api.access import RequireKey
from dejavu.api.endpoints import Endpoints
from dejavu.api.errors import ApiError, tell_api_error, tell_client_gone, tell_fault, tell_http_error
from dejavu.api.served import ServedModel
from dejavu.serving.service import Service


def create_app(
    service: Service, model: ServedModel, *, api_key: str | None = None, extra_routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """The ASGI application of a service.

    Args:
        api_key: needed for everything under ``/v1/``; None: nothing needs one.
        extra_routes: paths beside the API's own, such as ``/metrics``.
    """
    return Starlette(
        routes=[*Endpoints(service, model).routes(), *health.routes(service), *extra_routes],
        middleware=[] if api_key is None else [Middleware(RequireKey, key=api_key)],
        exception_handlers={
            ApiError: tell_api_error,
            HTTPException: tell_http_error,
            ClientDisconnect: tell_client_gone,
            Exception: tell_fault,
        },
    )
