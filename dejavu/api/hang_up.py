"""Work for a client that may go away: then the work is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. Raises ClientGone when the client hangs up before; the work is cancelled and over then.

    Once the request's body has been read: nothing but the end of the connection can come.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        # Also when this task itself is cancelled, as at the end of a server.
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
