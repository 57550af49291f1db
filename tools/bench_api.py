"""What the HTTP interface costs: many short requests on a service of two workers with a tiny model.

    python tools/bench_api.py [--requests 1000] [--concurrency 64] [--tokens 16] [--rounds 3]

For each round: errors, tokens/s, and of the serving process at the round's beginning and end, open files and resident
memory; and its processor time a token (HTTP, requests and rows, links, store and operator together), which depends less
than a clock does on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from served import PATIENCE_S, Served, served

from dejavu.clock import SystemClock
from dejavu.config import WorkloadConfig, WorkloadKind
from dejavu.report.load import Limits, load_report
from dejavu.workflows.bench_client import Endpoint, Load, LoadClient
from dejavu.workload import load_asks

_OVERRIDES = ("model=tiny-llama", "strategy=disaggregated", "serve.max_queue=1000000", "serve.completions=false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a process has used so far."""

    num_files: int
    resident_bytes: int
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> Account:
        """The account of a process that runs."""
        # The command's name stands in parentheses and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            num_files=len(os.listdir(f"/proc/{pid}/fd")),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        )


def main() -> None:
    """A line for each round is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), *_OVERRIDES) as service:
        print(f"{'errors':>8} {'tokens/s':>9} {'files':>11} {'memory, MB':>15}   µs a token")
        for _ in range(arguments.rounds):
            print(_round(service, arguments.requests, arguments.concurrency, arguments.tokens), flush=True)


def _round(service: Served, num_requests: int, concurrency: int, num_tokens: int) -> str:
    workload = WorkloadConfig(
        kind=WorkloadKind.synthetic,
        num_requests=num_requests,
        prompt_tokens=8,
        max_tokens=num_tokens,
        ignore_eos=True,
    )
    load = Load(
        endpoint=Endpoint.of(f"http://{service.address}", None, None),
        model="tiny-llama",
        asks=load_asks(workload, vocab_size=100),
        timeout_s=PATIENCE_S,
        max_concurrency=concurrency,
    )
    client = LoadClient(load, SystemClock(), lambda _: None)
    before = Account.of(service.process.pid)
    asyncio.run(client.run())
    after = Account.of(service.process.pid)
    report = load_report(client.samples, Limits(), endpoint="", model="", began="")
    tokens = max(report["tokens"]["output"], 1)
    cost = 1e6 * (after.cpu_s - before.cpu_s) / tokens
    return (
        f"{report['requests']['failed']:>8} {report['throughput']['output_tokens_per_s'] or 0:>9.0f} "
        f"{before.num_files:>5}–{after.num_files:<5} "
        f"{before.resident_bytes / 1e6:>7.1f}–{after.resident_bytes / 1e6:<7.1f} {cost:>10.0f}"
    )


if __name__ == "__main__":
    main()
