"""``/`` and ``/state``: the cluster as it is now, as a page and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from dejavu.api.metrics import metrics_route
from dejavu.serving.view import ClusterView

_NEVER_KEPT = {"Cache-Control": "no-store"}
# Nothing but the page's own script and style, and its own /state.
_PAGE_HEADERS = {
    **_NEVER_KEPT,
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


def page_html() -> str:
    """The page; it asks ``/state`` for what it shows."""
    return (resources.files("dejavu.api") / "page.html").read_text(encoding="utf-8")


def operations_routes(view: ClusterView) -> list[Route]:
    """``/``, ``/state`` and ``/metrics``. They need no key: they tell of the cluster, and nothing of any prompt."""
    return [Route("/", _page(page_html())), Route("/state", _state(view)), metrics_route(view)]


def _page(html: str) -> Callable[[Request], Response]:
    def page(_: Request) -> Response:
        return HTMLResponse(html, headers=_PAGE_HEADERS)

    return page


def _state(view: ClusterView) -> Callable[[Request], Response]:
    def state(_: Request) -> Response:
        return Response(msgspec.json.encode(view.state()), media_type="application/json", headers=_NEVER_KEPT)

    return state
