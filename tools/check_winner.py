"""Whether the simulator names the way to use four machines that a live cluster then finds the fastest.

    python tools/check_winner.py [--ratio 2 --ratio 10 --ratio 50] [--json FILE] [override ...]

For each ratio of a prompt's time to a step's (Y/t), one pipeline of four stages and every split serve the same
requests, rehearsed (the live cluster with modelled computation) and under a virtual clock. Two ways are told apart
where their rehearsed makespans differ by more than 10 %. Exit code 1: the simulator has two such ways the other way
round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from check_rehearsal import config_of, rehearse, simulated

TOLERANCE = 0.10
STEP_S = 0.16
"""t; a stage of four takes 40 ms, many times as long as a hop here."""
DEFAULTS = (
    "model=opt-13b",
    "model.compute=modelled",
    "model.max_length=256",
    "profile=given",
    f"profile.token_time_s={STEP_S}",
    "workload=lmsys-like",
    "workload.num_requests=32",
    "workload.prompt_tokens=128",
    "workload.median_tokens=20",
    "workload.max_tokens=64",
    "strategy.microbatch.prompt=4",
    "strategy.microbatch.token=4",
)
WAYS: Mapping[str, Sequence[str]] = {
    "4": ("strategy=colocated", "strategy.stages=4"),
    "1 + 3": ("strategy.split.prompt=1", "strategy.split.token=3"),
    "2 + 2": ("strategy.split.prompt=2", "strategy.split.token=2"),
    "3 + 1": ("strategy.split.prompt=3", "strategy.split.token=1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way at one ratio. Makespans in seconds."""

    ratio: float
    way: str
    rehearsed_s: float
    simulated_s: float


def main(arguments: Sequence[str]) -> int:
    """The table is on the terminal, and in ``--json``. 0 when no winner is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", action="append", type=float)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="such as workload.num_requests=16")
    options = parser.parse_args(arguments)
    runs: list[Run] = []
    wrong: list[str] = []
    for ratio in options.ratio or (2.0, 10.0, 50.0):
        own = [run(ratio, way, options.overrides) for way in WAYS]
        runs += own
        wrong += reversed_pairs(own)
        live, virtual = min(own, key=lambda one: one.rehearsed_s), min(own, key=lambda one: one.simulated_s)
        print(f"Y/t {ratio:g}: fastest rehearsed {live.way}, simulated {virtual.way}", flush=True)
    print(f"wrong way round: {'; '.join(wrong) or 'none'}")
    if options.json is not None:
        options.json.write_text(json.dumps({"runs": [asdict(one) for one in runs], "wrong": wrong}, indent=2) + "\n")
    return 1 if wrong else 0


def run(ratio: float, way: str, overrides: Sequence[str]) -> Run:
    """One way, rehearsed and simulated."""
    config = config_of((*DEFAULTS, *WAYS[way], f"profile.prompt_time_s={ratio * STEP_S}", *overrides))
    rehearsed_s, _, _ = rehearse(config)
    one = Run(ratio=ratio, way=way, rehearsed_s=rehearsed_s, simulated_s=simulated(config).makespan_s)
    off = one.rehearsed_s / one.simulated_s - 1
    print(f"  {way:6} rehearsed {rehearsed_s:7.2f} s, simulated {one.simulated_s:7.2f} s: {off:+.1%}", flush=True)
    return one


def reversed_pairs(own: Sequence[Run]) -> list[str]:
    """Pairs that the rehearsal tells apart and the simulator has the other way round."""
    found = []
    for one, other in combinations(own, 2):
        fast, slow = sorted((one, other), key=lambda run: run.rehearsed_s)
        if slow.rehearsed_s > (1 + TOLERANCE) * fast.rehearsed_s and slow.simulated_s <= fast.simulated_s:
            found.append(f"Y/t {fast.ratio:g}: {slow.way} before {fast.way}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
