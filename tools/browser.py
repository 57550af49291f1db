"""A headless Chromium with one page, driven over its DevTools. For screenshots and for tests of the page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
_START_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 30.0
_LOOK_S = 0.1


def find_chromium() -> str | None:
    """The browser's path, or None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


class Browser:
    """The page. One thread; every call blocks until it is done."""

    def __init__(self, runner: asyncio.Runner, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._runner = runner
        self._socket = socket
        self._last_id = 0

    def open(self, url: str) -> None:
        """``url`` is loaded. Raises TimeoutError."""
        self.call("Page.navigate", url=url)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'", _CALL_TIMEOUT_S)

    def look_like(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """The page is so large, in CSS pixels, and its reader wants it so."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """The expression's value as JSON has it. Raises RuntimeError where it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float) -> Any:
        """The expression's value once it is true. Raises TimeoutError with the page's text."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline_s:
                shown = self.evaluate("document.body.innerText")
                raise TimeoutError(f"not true within {timeout_s:g} s: {expression}\nthe page shows:\n{shown}")
            time.sleep(_LOOK_S)
        return value

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """``path`` is a PNG of what is visible, or of the page's first ``height`` pixels."""
        clip: dict[str, Any] = {}
        if height is not None:
            width = self.evaluate("window.innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=height is not None, **clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """The result of a DevTools command. Raises RuntimeError for an error, TimeoutError for no answer."""
        return self._runner.run(asyncio.wait_for(self._call(method, parameters), _CALL_TIMEOUT_S))

    async def _call(self, method: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        self._last_id += 1
        await self._socket.send_json({"id": self._last_id, "method": method, "params": parameters})
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: Mapping[str, Any] = answer["result"]
                return result
        raise RuntimeError(f"{method}: the browser has closed the connection")


@contextlib.contextmanager
def browsing(chromium: str) -> Iterator[Browser]:
    """A page of a browser of its own; at the end nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="dejavu-browser-", ignore_cleanup_errors=True) as folder:
        process = _started(chromium, Path(folder))
        try:
            with asyncio.Runner() as runner:
                session = runner.run(_session())
                try:
                    yield Browser(runner, runner.run(_page(session, Path(folder), process)))
                finally:
                    runner.run(session.close())
        finally:
            # Its helpers are in its group, and would outlive it for a while.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _started(chromium: str, folder: Path) -> subprocess.Popen[bytes]:
    flags = [
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--no-first-run",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        "--no-proxy-server",
    ]
    if os.geteuid() == 0:
        # Chromium refuses to run as root with its sandbox.
        flags.append("--no-sandbox")
    return subprocess.Popen(
        [chromium, *flags, "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


async def _page(
    session: aiohttp.ClientSession, folder: Path, process: subprocess.Popen[bytes]
) -> aiohttp.ClientWebSocketResponse:
    """A connection to the browser's page, as soon as there is one."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_S)
        try:
            port = (folder / "DevToolsActivePort").read_text().splitlines()[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = [target for target in await response.json() if target["type"] == "page"]
        except (OSError, IndexError, aiohttp.ClientError):
            continue
        if pages:
            # A screenshot is one message, and large.
            return await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
    raise TimeoutError(f"{process.args!r}: no page within {_START_TIMEOUT_S:g} s (exit status {process.poll()})")
