"""What answering over HTTP costs: processor time of the serving process for each token, streamed and in whole answers.

Controller, text and HTTP together; the workers are other processes. A tiny model, so that tokens come fast.
Run: python tools/bench_api.py [--token-ms 30]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

MODEL = ["model=tiny-llama", "strategy=colocated", "strategy.stages=1"]
NUM_STREAMS, ROUNDS, NEW_TOKENS = 16, 8, 100
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def ask(url: str, is_stream: bool) -> None:
    """One answer has been read to its end."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    body = {"prompt": "hello", "max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0, "stream": is_stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    connection.getresponse().read()
    connection.close()


def served_ms(folder: Path) -> tuple[float, float]:
    """Milliseconds a token of the serving process: streamed, and in whole answers."""
    words = [sys.executable, "-m", "dejavu.run", "workflow=serve", "serve.port=0", f"hydra.run.dir={folder}", *MODEL]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if line.startswith("serving "))
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            costs = []
            for is_stream in (True, True, False):
                before_s = processor_s(process.pid)
                list(pool.map(lambda _: ask(url, is_stream), range(NUM_STREAMS * ROUNDS)))  # noqa: B023
                costs.append(1000 * (processor_s(process.pid) - before_s) / (NUM_STREAMS * ROUNDS * NEW_TOKENS))
        process.terminate()
        process.communicate()
    return costs[1], costs[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token-ms", type=float, default=30.0, help="what a token of the real model takes")
    token_ms = parser.parse_args().token_ms
    with tempfile.TemporaryDirectory() as folder:
        streamed, whole = served_ms(Path(folder) / "serve")
    print(
        f"streamed: {streamed:.3f} ms of processor time a token, {100 * streamed / token_ms:.1f} % of {token_ms:g} ms"
    )
    print(f"whole:    {whole:.3f} ms of processor time a token, {100 * whole / token_ms:.1f} % of {token_ms:g} ms")


if __name__ == "__main__":
    main()
