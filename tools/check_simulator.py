"""The simulator against the live cluster on this machine: makespans beside each other, and who wins.

    python tools/check_simulator.py --profile FOLDER/profile.json [--output FOLDER] [--rounds 3] [--requests 24]
        [--mixes fixed lognormal lmsys] [--prompt-tokens 256] [OVERRIDE ...]

The profile is one that ``workflow=profile profiling.neighbours=1`` measured on this machine, which two workers share.
For every mix of answers, one pipeline of two stages and a split 1 + 1 serve the same requests live
(``workflow=generate``, a fresh cluster each time, in an order that rotates from round to round) and under the virtual
clock (``workflow=simulate``). ``check.json`` and the lines printed have both makespans and what the stages were busy
with; a winner counts as told apart where the live makespans differ by more than 10 %. Exit code 1: some makespan is off
by more than 10 %, or a winner is wrong. OVERRIDE goes to
both, and to the simulation alone where it begins with ``simulate.``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

_TOLERANCE = 0.10
_MODES = {
    "colocated": ("strategy=colocated", "strategy.stages=2"),
    "disaggregated": ("strategy=disaggregated", "strategy.split.prompt=1", "strategy.split.token=1"),
}
_MIXES = {
    "fixed": ("workload=synthetic", "workload.max_tokens=32"),
    "lognormal": (
        "workload=synthetic",
        "workload.max_tokens=120",
        "workload.median_tokens=24",
        "workload.sigma=0.9",
    ),
    # A quarter of what LMSYS conversations have.
    "lmsys": ("workload=lmsys-like", "workload.median_tokens=35", "workload.max_tokens=128"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One mix and mode. Seconds; medians over the rounds."""

    mix: str
    mode: str
    live_s: float
    live_rounds_s: tuple[float, ...]
    simulated_s: float
    live_busy_s: tuple[float, ...]
    """Of each stage, of the round whose makespan is the median."""
    simulated_busy_s: tuple[float, ...]

    @property
    def off(self) -> float:
        """By which part of the live makespan the simulated one is longer."""
        return self.simulated_s / self.live_s - 1


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--mixes", nargs="+", choices=list(_MIXES), default=list(_MIXES))
    args, overrides = parser.parse_known_args()
    output = args.output or Path(tempfile.mkdtemp(prefix="check-simulator-"))
    output.mkdir(parents=True, exist_ok=True)
    shared = (
        f"workload.num_requests={args.requests}",
        f"workload.prompt_tokens={args.prompt_tokens}",
        "model.max_length=1024",
        *overrides,
    )
    checked = []
    for mix in args.mixes:
        checked += _check(mix, shared, args.profile.absolute(), output / mix, args.rounds)
    winners = {mix: _winner([one for one in checked if one.mix == mix]) for mix in args.mixes}
    wrong = [mix for mix, one in winners.items() if one["wrong"]]
    far = [one for one in checked if abs(one.off) > _TOLERANCE]
    document = {"checked": [{**asdict(one), "off": one.off} for one in checked], "winners": winners}
    (output / "check.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"\n{len(checked) - len(far)} of {len(checked)} makespans within {_TOLERANCE:.0%}")
    print(f"wrong winners: {', '.join(wrong) or 'none'}")
    print(f"output: {output}")
    return 1 if far or wrong else 0


def _check(mix: str, shared: Sequence[str], profile: Path, folder: Path, rounds: int) -> list[Checked]:
    lives: dict[str, list[dict[str, Any]]] = {mode: [] for mode in _MODES}
    for number in range(rounds):
        modes = list(_MODES)
        for mode in modes[number % 2 :] + modes[: number % 2]:
            own = (*_MODES[mode], *_MIXES[mix], *(text for text in shared if not text.startswith("simulate.")))
            lives[mode].append(_run(folder / f"{mode}-{number + 1}", "metrics.json", "workflow=generate", *own))
    checked = []
    for mode, runs in lives.items():
        own = (*_MODES[mode], *_MIXES[mix], *shared)
        source = ("workflow=simulate", "profile=measured", f"profile.path={profile}")
        simulated = _run(folder / f"{mode}-simulated", "simulation.json", *source, *own)
        typical = sorted(runs, key=lambda run: run["wall_s"])[(len(runs) - 1) // 2]
        one = Checked(
            mix=mix,
            mode=mode,
            live_s=median(run["wall_s"] for run in runs),
            live_rounds_s=tuple(run["wall_s"] for run in runs),
            simulated_s=simulated["makespan_s"],
            live_busy_s=tuple(stage["compute_s"] for stage in typical["stages"]),
            simulated_busy_s=tuple(stage["busy_s"] for stage in simulated["stages"]),
        )
        print(
            f"{mix:10} {mode:14} live {one.live_s:7.2f} s  simulated {one.simulated_s:7.2f} s  {one.off:+6.1%}  "
            f"busy live {_shown(one.live_busy_s)}, simulated {_shown(one.simulated_busy_s)}",
            flush=True,
        )
        checked.append(one)
    return checked


def _run(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    """The file that the run left in its folder. Raises SystemExit with the run's last words where it failed."""
    command = [sys.executable, "-m", "dejavu.run", f"hydra.run.dir={folder}", *overrides]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


def _winner(checked: Sequence[Checked]) -> dict[str, Any]:
    """Who was faster, live and simulated; wrong only where the live runs tell them apart."""
    colocated, disaggregated = checked
    live, simulated = colocated.live_s / disaggregated.live_s, colocated.simulated_s / disaggregated.simulated_s
    told_apart = not 1 - _TOLERANCE <= live <= 1 + _TOLERANCE
    return {
        "live_ratio": live,
        "simulated_ratio": simulated,
        "told_apart": told_apart,
        "wrong": told_apart and (live > 1) != (simulated > 1),
    }


def _shown(seconds: Sequence[float]) -> str:
    return " ".join(f"{one:.1f}" for one in seconds)


if __name__ == "__main__":
    raise SystemExit(main())
