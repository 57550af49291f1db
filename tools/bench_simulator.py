"""Speed and memory of the simulator, as medians of one run.

    python tools/bench_simulator.py [--rounds 5] [--requests 512] [--stages 16] [--rows 8]

- reference: ``simulate.reference=true`` for microbatches of about 200 tokens, in one pipeline and split 5 + 11; beside
  it the 1.3 s that the original project's simulator is said to take for the same on 16 stages
- cluster: the simulator that runs the cluster's control code, the same requests in microbatches of ``--rows``
- search: the best plan of 16 machines over all splits and batch sizes by the planner's formulas; and by the simulator
  over all splits, batch sizes and degrees of data parallelism, as ``experiment=fig20`` searches for one number of
  machines: a guess for each, and the three most promising of each kind simulated
- memory: what the cluster's run holds at its peak, for answers of usual and of fourfold length: it must not grow
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from check_rehearsal import config_of
from rich.console import Console

from dejavu.control.placement import Declared, place
from dejavu.control.plan import Mode, Plan
from dejavu.ids import Epoch, RequestId
from dejavu.models.spec import ModelSpec
from dejavu.planning.costs import GivenCosts
from dejavu.planning.sizing import plan_with_rows
from dejavu.request import Request
from dejavu.sim.reference import colocated, disaggregated
from dejavu.sim.simulation import Setting, simulate
from dejavu.workflows.plan import question
from dejavu.workflows.simulation_comparison import compare

_ORIGINAL_S = 1.3
_PROMPT_S, _TOKEN_S = 1.307, 0.035
"""OPT-66B, batch 8, prompts of 1000 tokens."""
_NUM_LAYERS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    draw = random.Random(1)
    trace = [draw.randrange(150, 251) for _ in range(args.requests)]
    split = (max(1, args.stages * 5 // 16), args.stages - max(1, args.stages * 5 // 16))
    _report("reference, colocated", args.rounds, lambda: _colocated(trace, args.stages), _ORIGINAL_S)
    _report(f"reference, split {split[0]} + {split[1]}", args.rounds, lambda: _split(trace, split), _ORIGINAL_S)
    for mode in ("colocated", "disaggregated"):
        plan = _plan(mode, args.stages, split, args.rows)  # type: ignore[arg-type]
        _report(f"cluster, {mode}", args.rounds, lambda plan=plan: _cluster(plan, trace, args.rows))  # type: ignore[misc]
    _search(args.rounds, args.requests)
    plan = _plan("colocated", args.stages, split, args.rows)
    for times in (1, 4):
        longer = [new * times for new in trace]
        tracemalloc.start()
        events = _cluster(plan, longer, args.rows)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"memory, {sum(longer):>9,} tokens, {events:>9,} events: {peak_bytes / 1e6:6.2f} MB at the peak")


def _search(rounds: int, num_requests: int) -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    fig20 = config_of(
        (
            "experiment=fig20",
            "simulate.compare.machines=[16]",
            f"simulate.compare.microbatches={sizes}",
            f"workload.num_requests={num_requests}",
        )
    )
    asked = replace(question(replace(fig20, cluster=replace(fig20.cluster, num_machines=16))), rows=max(sizes))
    _report("search, planner", rounds, lambda: plan_with_rows(asked))
    shown = Console(file=io.StringIO())
    with tempfile.TemporaryDirectory(prefix="bench-simulator-") as folder:
        _report("search, simulator", 1, lambda: compare(fig20, Path(folder), shown))


def _report(name: str, rounds: int, work: Callable[[], object], original_s: float | None = None) -> None:
    times_s, own_s = [], []
    for _ in range(rounds):
        start_s, started_s = time.perf_counter(), time.process_time()
        work()
        times_s.append(time.perf_counter() - start_s)
        own_s.append(time.process_time() - started_s)
    middle_s = statistics.median(times_s)
    beside = "" if original_s is None else f"   {original_s / middle_s:5.0f} times as fast as {original_s:g} s"
    spread = f"{min(times_s) * 1e3:.1f} to {max(times_s) * 1e3:.1f}; processor {statistics.median(own_s) * 1e3:.1f}"
    print(f"{name:24} {middle_s * 1e3:9.1f} ms   ({spread}){beside}")


def _colocated(trace: Sequence[int], depth: int) -> None:
    colocated(trace, [0.0] * len(trace), depth=depth, prompt_s=_PROMPT_S / depth, token_s=_TOKEN_S / depth)


def _split(trace: Sequence[int], split: tuple[int, int]) -> None:
    disaggregated(
        trace,
        [0.0] * len(trace),
        prompt_depth=split[0],
        token_depth=split[1],
        prompt_s=_PROMPT_S / split[0],
        token_s=_TOKEN_S / split[1],
    )


def _cluster(plan: Plan, trace: Sequence[int], rows: int) -> int:
    prompt = (0,) * 1000
    requests = [
        Request(id=RequestId(str(number)), prompt_tokens=prompt, max_tokens=new) for number, new in enumerate(trace)
    ]
    costs = GivenCosts(rows=rows, whole_prompt_time_s=_PROMPT_S, whole_token_time_s=_TOKEN_S)
    return simulate(Setting(plan=plan, costs=costs), requests).num_events


def _plan(mode: Mode, stages: int, split: tuple[int, int], rows: int) -> Plan:
    declared = Declared(
        mode=mode,
        prompt_depth=split[0],
        token_depth=split[1],
        colocated_depth=stages,
        prompt_rows=rows,
        token_rows=rows,
        in_flight=stages,
        scheduling="microbatch",
    )
    model = ModelSpec(
        folder="",
        family="opt",
        dtype="float16",
        max_length=4096,
        num_layers=_NUM_LAYERS,
        num_heads=72,
        num_kv_heads=72,
        head_dim=128,
        hidden_size=9216,
        vocab_size=50272,
        eos_token_ids=(),
        model_hash="",
        layer_parameters=10**9,
        embedding_parameters=0,
        head_parameters=0,
    )
    return place(declared, model, epoch=Epoch(1))


if __name__ == "__main__":
    main()
