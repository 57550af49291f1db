"""Generated tokens per second of our clusters beside transformers' own batched ``generate``, in one run.

    python tools/bench_serving.py [--repeats 3] [--dtypes float32,bfloat16] [--json FILE]

Every figure is of a process of its own, with everything but the serving left out: ours from the ``wall_s`` of
``metrics.json`` (which begins when all workers serve), ``generate`` timed around the call after a short warm-up. The
measurements are interleaved (all modes once, then all again), so that a noisy minute hits all of them alike; compare
ratios, not figures of different runs. All prompts have one length, so ``generate`` pays for no padding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OUR_MODES = ("colocated-1", "colocated-2", "disaggregated-1+1")
GENERATE_MODES = ("generate-1", "generate-2")
ALL_MODES = OUR_MODES + GENERATE_MODES
TWO_WORKER_MODES = ("colocated-2", "disaggregated-1+1")
WANTED = {"float32": (1.1, 1.7, 1.3), "bfloat16": (1.1, 1.7, 1.5)}
_WARM_UP_TOKENS = 4
_RUN_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work that every mode gets."""

    model: str
    num_requests: int
    prompt_tokens: int
    new_tokens: int
    overrides: tuple[str, ...] = ()
    """Further overrides of our runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Where one worker's time went, as shares of the serving time."""

    worker: str
    pipeline: str
    stage: int
    busy: float
    """Of the time from its first work to its last."""
    prompt: float
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One mode, once."""

    dtype: str
    mode: str
    tokens_per_s: float
    wall_s: float
    first_token_s: float | None = None
    stages: tuple[StageShare, ...] = field(default=())


def strategy_of(mode: str, num_requests: int) -> list[str]:
    """The overrides of one of our modes: all requests have a row, spread over as many microbatches as stages."""
    if mode == "disaggregated-1+1":
        return ["strategy=disaggregated", f"strategy.microbatch.token={num_requests}"]
    stages = int(mode.removeprefix("colocated-"))
    rows = -(-num_requests // stages)
    return ["strategy=colocated", f"strategy.stages={stages}", f"strategy.microbatch.token={rows}"]


def measure_ours(mode: str, dtype: str, load: Load) -> Measurement:
    """One run of the command. Raises RuntimeError with the end of its output when it fails or loses a token."""
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        command = [sys.executable, "-m", "dejavu.run", f"model={load.model}", f"model.dtype={dtype}"]
        command += ["cluster.threads_per_worker=1", *strategy_of(mode, load.num_requests), "workload=synthetic"]
        command += [f"workload.num_requests={load.num_requests}", f"workload.prompt_tokens={load.prompt_tokens}"]
        command += [f"workload.max_tokens={load.new_tokens}", "workload.ignore_eos=true", f"hydra.run.dir={folder}"]
        run_checked([*command, *load.overrides], os.environ)
        metrics = json.loads(Path(folder, "metrics.json").read_text())
        timeline = json.loads(Path(folder, "timeline.json").read_text())
    expected = load.num_requests * load.new_tokens
    if metrics["tokens"]["generated"] != expected:
        raise RuntimeError(f"{mode}: {metrics['tokens']['generated']} tokens generated, {expected} were asked for")
    wall_s = metrics["wall_s"]
    computed_s = computed_by_kind(timeline)
    return Measurement(
        dtype=dtype,
        mode=mode,
        tokens_per_s=metrics["throughput"]["tokens_per_s"],
        wall_s=wall_s,
        first_token_s=metrics["latency"]["time_to_first_token_s"]["median"],
        stages=tuple(
            StageShare(
                worker=stage["worker"],
                pipeline=stage["pipeline"],
                stage=stage["stage"],
                busy=stage["busy_share"] or 0.0,
                prompt=computed_s.get((stage["worker"], "prompt"), 0.0) / wall_s,
                step=computed_s.get((stage["worker"], "step"), 0.0) / wall_s,
            )
            for stage in metrics["stages"]
        ),
    )


def computed_by_kind(timeline: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Seconds of computation by (worker, ``prompt`` or ``step``)."""
    events = timeline["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    seconds: dict[tuple[str, str], float] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "compute":
            key = (names[event["pid"]], event["name"])
            seconds[key] = seconds.get(key, 0.0) + event["dur"] / 1e6
    return seconds


def measure_generate(mode: str, dtype: str, load: Load) -> Measurement:
    """transformers' ``generate`` over all prompts as one batch, in a process of its own."""
    num_threads = int(mode.removeprefix("generate-"))
    spec = {
        "model": load.model,
        "dtype": dtype,
        "num_threads": num_threads,
        "num_requests": load.num_requests,
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
    output = run_checked([sys.executable, __file__, "--generate-once", json.dumps(spec)], environment)
    wall_s = float(output.strip().splitlines()[-1])
    num_tokens = load.num_requests * load.new_tokens
    return Measurement(dtype=dtype, mode=mode, tokens_per_s=num_tokens / wall_s, wall_s=wall_s)


def run_checked(command: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> str:
    """The command's standard output. Raises RuntimeError with the end of its output when it fails."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"exit status {done.returncode} of: {' '.join(command)}\n{end}")
    return done.stdout


def generate_once(spec: dict[str, Any]) -> float:
    """The seconds that ``generate`` takes for all prompts as one batch; loading and a short warm-up come before."""
    import random

    import torch

    from dejavu.models.reference import generate_batch, load_reference
    from dejavu.models.source import ModelSource, cache_folder, resolve

    torch.set_num_threads(spec["num_threads"])
    folder = resolve(ModelSource(kind=spec["model"]), cache_folder(), lambda *_: None)
    model = load_reference(folder, spec["dtype"])
    draw = random.Random(0)
    vocab_size = model.config.vocab_size
    prompts = [[draw.randrange(vocab_size) for _ in range(spec["prompt_tokens"])] for _ in range(spec["num_requests"])]
    generate_batch(model, prompts[:2], min(_WARM_UP_TOKENS, spec["new_tokens"]), ignore_eos=True)
    start_s = time.perf_counter()
    rows = generate_batch(model, prompts, spec["new_tokens"], ignore_eos=True)
    wall_s = time.perf_counter() - start_s
    if any(len(row) != spec["new_tokens"] for row in rows):
        raise RuntimeError("generate ended a row early")
    return wall_s


def measure_all(modes: Sequence[str], dtypes: Sequence[str], load: Load, repeats: int) -> list[Measurement]:
    """Every mode ``repeats`` times, interleaved; a line is printed as each comes."""
    measurements = []
    for repeat in range(repeats):
        for dtype in dtypes:
            for mode in modes:
                measure = measure_generate if mode in GENERATE_MODES else measure_ours
                one = measure(mode, dtype, load)
                measurements.append(one)
                print(f"{repeat + 1}/{repeats} {dtype:>9} {mode:<18} {one.tokens_per_s:8.1f} tokens/s", flush=True)
    return measurements


def speeds(measurements: Iterable[Measurement], dtype: str, mode: str) -> list[float]:
    """Tokens/s of every repeat, slowest first; empty when the mode was not measured."""
    return sorted(one.tokens_per_s for one in measurements if (one.dtype, one.mode) == (dtype, mode))


def speed_table(measurements: Sequence[Measurement], dtypes: Sequence[str], modes: Sequence[str]) -> str:
    """Markdown: median, least and most of each mode, and where the time of its median repeat went."""
    lines = [
        "| dtype | mode | tokens/s | min–max | first token s | busy; prompts + steps, of serving time |",
        "|---|---|---:|---:|---:|---|",
    ]
    for dtype in dtypes:
        for mode in modes:
            ranked = sorted(
                (one for one in measurements if (one.dtype, one.mode) == (dtype, mode)),
                key=lambda one: one.tokens_per_s,
            )
            middle = ranked[len(ranked) // 2]
            median = statistics.median(one.tokens_per_s for one in ranked)
            first = "" if middle.first_token_s is None else f"{middle.first_token_s:.2f}"
            lines.append(
                f"| {dtype} | {mode} | {median:.1f} | {ranked[0].tokens_per_s:.1f}–{ranked[-1].tokens_per_s:.1f} "
                f"| {first} | {shares(middle.stages)} |"
            )
    return "\n".join(lines)


def shares(stages: Sequence[StageShare]) -> str:
    """``token 0: 98 %; 0 + 97``, a piece for each stage."""
    return " · ".join(
        f"{one.pipeline} {one.stage}: {one.busy:.0%}; {100 * one.prompt:.0f} + {100 * one.step:.0f}" for one in stages
    )


def ratio_table(measurements: Sequence[Measurement], dtypes: Sequence[str]) -> str:
    """Markdown: the three ratios of medians beside what is wanted; ``–`` where a mode was not measured."""
    lines = [
        "| dtype | one worker / generate-1 | best two workers / one worker | best two workers / generate-2 |",
        "|---|---:|---:|---:|",
    ]
    for dtype in dtypes:
        medians = {mode: statistics.median(found) for mode in ALL_MODES if (found := speeds(measurements, dtype, mode))}
        two = max((medians[mode] for mode in TWO_WORKER_MODES if mode in medians), default=None)
        one = medians.get("colocated-1")
        pairs = ((one, medians.get("generate-1")), (two, one), (two, medians.get("generate-2")))
        wanted = WANTED.get(dtype, (None, None, None))
        cells = [_ratio(top, bottom, least) for (top, bottom), least in zip(pairs, wanted, strict=True)]
        lines.append(f"| {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(top: float | None, bottom: float | None, least: float | None) -> str:
    if top is None or bottom is None:
        return "–"
    wanted = "" if least is None else f" (wanted {least:g})"
    return f"{top / bottom:.2f}{wanted}"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; modes and dtypes as tuples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a model option that needs no further key")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--modes", default=",".join(ALL_MODES), help="of: " + ", ".join(ALL_MODES))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further override of ours")
    parser.add_argument("--json", type=Path, help="write every measurement here too")
    parser.add_argument("--generate-once", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.dtypes = tuple(arguments.dtypes.split(","))
    arguments.modes = tuple(arguments.modes.split(","))
    unknown = [mode for mode in arguments.modes if mode not in ALL_MODES]
    if unknown:
        parser.error(f"--modes {','.join(unknown)}: choose of {', '.join(ALL_MODES)}")
    return arguments


def main() -> None:
    """Prints a line a measurement, then the tables."""
    arguments = parse_arguments()
    if arguments.generate_once is not None:
        print(generate_once(json.loads(arguments.generate_once)))
        return
    load = Load(
        model=arguments.model,
        num_requests=arguments.requests,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        overrides=tuple(arguments.set),
    )
    measurements = measure_all(arguments.modes, arguments.dtypes, load, arguments.repeats)
    print(
        f"\n{load.model}, {load.num_requests} requests of {load.prompt_tokens} prompt tokens and {load.new_tokens} "
        f"new ones, {os.cpu_count()} cores, one thread a worker, median of {arguments.repeats}\n"
    )
    print(speed_table(measurements, arguments.dtypes, arguments.modes))
    print()
    print(ratio_table(measurements, arguments.dtypes))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(one) for one in measurements], indent=2) + "\n")


if __name__ == "__main__":
    main()
