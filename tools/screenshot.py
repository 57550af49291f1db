"""Makes the pictures of the page in ``docs/images`` out of a live run: a service under load, and one of whose workers
is killed.

    python tools/screenshot.py [--model smollm2-135m] [--folder docs/images]

Needs Chromium (Debian package ``chromium``). Takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from browser import Browser, browsing, find_chromium
from PIL import Image
from served import PATIENCE_S, Served, served

from dejavu.clock import SystemClock
from dejavu.config import WorkloadConfig, WorkloadKind
from dejavu.workflows.bench_client import Endpoint, Load, LoadClient
from dejavu.workload import load_asks

_DRAIN = "serve.drain_timeout_s=1"
_COLORS = 96
"""Of a picture: the page has few, and a repository keeps every version."""
_WIDE, _PHONE = (1100, 900), (420, 860)
_BEFORE_S, _AFTER_S = 45.0, 20.0
_GONE = "document.querySelector('[data-state=dead], [data-state=absent], [data-state=starting]') !== null"
_READY = "document.getElementById('ready').textContent === 'ready'"


def main() -> None:
    """``page.png``, ``page-repair.png`` and ``page-phone.png`` are in the folder."""
    arguments = _arguments()
    chromium = find_chromium()
    if chromium is None:
        raise SystemExit("no Chromium is installed (Debian package chromium)")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    overrides = (f"model={arguments.model}", "strategy.split.token=2", "strategy.replication=1", _DRAIN)
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), *overrides) as service:
        load = threading.Thread(target=_send, args=(service, arguments.rate), daemon=True)
        load.start()
        with browsing(chromium) as page:
            _take(page, service, arguments.folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="an option of the group model")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    return parser.parse_args()


def _send(service: Served, rate: float) -> None:
    workload = WorkloadConfig(
        kind=WorkloadKind.synthetic, prompt_tokens=48, max_tokens=72, num_requests=200, ignore_eos=True, rate=rate
    )
    load = Load(
        endpoint=Endpoint.of(f"http://{service.address}", None, None),
        model=str(service.state()["model"]),
        asks=load_asks(workload, vocab_size=100),
        timeout_s=PATIENCE_S,
    )
    asyncio.run(LoadClient(load, SystemClock(), lambda _: None).run())


def _take(page: Browser, service: Served, folder: Path) -> None:
    page.look_like(*_WIDE)
    page.open(f"http://{service.address}/")
    page.wait_for(_READY, PATIENCE_S)
    time.sleep(_BEFORE_S)
    _picture(page, folder / "page.png")
    os.kill(service.state()["pipelines"][1]["stages"][1]["pid"], signal.SIGKILL)
    page.wait_for(f"!({_READY}) && {_GONE}", PATIENCE_S)
    _picture(page, folder / "page-repair.png")
    page.wait_for(_READY, PATIENCE_S)
    time.sleep(_AFTER_S)
    page.look_like(*_PHONE, is_dark=True)
    _picture(page, folder / "page-phone.png")


def _picture(page: Browser, path: Path) -> None:
    page.screenshot(path, height=int(page.evaluate("Math.ceil(document.body.getBoundingClientRect().height)")))
    Image.open(path).convert("RGB").quantize(_COLORS, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


if __name__ == "__main__":
    main()
