"""What replication costs while nothing fails: the same batches with copies and without, in turn, on one cluster.

    python tools/bench_replication.py [--stages 3] [--copies 1] [--rounds 9] [--json FILE]

Copies are switched off by the streaming level, which in a colocated pipeline rules nothing else. Each round serves the
batch once with copies and once without, in an order that rotates; the ratio of a round is that of its two batches, so a
noisy minute meets both. Tokens with copies must be those without, or the measurement fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_module

from dejavu.clock import SystemClock
from dejavu.config import Config, load, register_schema, validate
from dejavu.report.machine import machine
from dejavu.report.progress import SilentProgress
from dejavu.request import Request
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.preparation import Prepared, prepare
from dejavu.workflows.streaming_batch import Bench, check_same

WITH, WITHOUT = "full", "off"


def main(arguments: Sequence[str]) -> int:
    """The table is on the terminal, and in ``--json`` every round."""
    options = parsed(arguments)
    logging.basicConfig(level=logging.WARNING)
    config = config_of(options)
    prepared = prepare(config, SilentProgress())
    with tempfile.TemporaryDirectory(prefix="bench-replication-") as folder:
        rounds = measure(config, prepared, Path(folder), options.rounds)
    ratios = [one[WITH] / one[WITHOUT] for one in rounds]
    num_tokens = len(prepared.requests) * config.workload.max_tokens if config.workload.max_tokens else 0
    for name in (WITHOUT, WITH):
        latency_s = statistics.median(one[name] for one in rounds)
        sys.stdout.write(f"copies {name:5} {latency_s:8.3f} s a batch, {num_tokens / latency_s:7.1f} tokens/s\n")
    low, high = min(ratios), max(ratios)
    sys.stdout.write(
        f"with / without: median {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) of {len(ratios)} rounds; "
        f"{options.copies} copies on {options.stages} stages; {machine()}\n"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "rounds": rounds, "ratios": ratios}, indent=2) + "\n")
    return 0


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch; as many microbatches as stages")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="further overrides, such as model.dtype=bfloat16")
    return parser.parse_args(arguments)


def config_of(options: argparse.Namespace) -> Config:
    """The declaration of the cluster."""
    overrides = [
        "strategy=colocated",
        f"strategy.stages={options.stages}",
        f"strategy.replication={options.copies}",
        f"strategy.microbatch.token={options.rows}",
        f"strategy.microbatch.prompt={options.rows}",
        "workload=synthetic",
        f"workload.num_requests={options.rows * options.stages}",
        f"workload.prompt_tokens={options.prompt_tokens}",
        f"workload.max_tokens={options.new_tokens}",
        "workload.ignore_eos=true",
        f"model.max_length={2 * (options.prompt_tokens + options.new_tokens)}",
        *options.overrides,
    ]
    register_schema()
    with initialize_config_module(config_module="dejavu.conf", version_base="1.3"):
        config = load(compose("config", overrides=overrides), directory=Path.cwd())
    validate(config)
    return config


def measure(config: Config, prepared: Prepared, folder: Path, num_rounds: int) -> list[dict[str, float]]:
    """Seconds of a batch with copies and without, round by round; a first round that warms up is left out."""
    rounds: list[dict[str, float]] = []
    with running_cluster(config, prepared.plan, folder, SilentProgress()) as cluster:
        bench = Bench(cluster, prepared.plan, SystemClock(), lambda share: None)
        for index in range(num_rounds + 1):
            levels = (WITH, WITHOUT) if index % 2 else (WITHOUT, WITH)
            rounds.append(one_round(bench, prepared.requests, levels, config.model.kind))
            sys.stderr.write(f"round {index} of {num_rounds}: {rounds[-1]}\n")
    return rounds[1:]


def one_round(bench: Bench, requests: Sequence[Request], levels: Sequence[str], model: str) -> dict[str, float]:
    """Seconds by level. Raises DejavuError when copies have changed a token."""
    served = {level: bench.serve(level, requests) for level in levels}
    check_same(model, WITH, served[WITHOUT].answers, served[WITH].answers)
    return {level: one.latency_s for level, one in served.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
