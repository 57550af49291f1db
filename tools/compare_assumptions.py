"""Why a simulated disaggregation gains less here than in the paper (Fig. 20, 21): one assumption changed at a time.

    python tools/compare_assumptions.py [--experiment fig21] [--machines 8 --machines 16] [override ...]

For each number of machines, the makespans of one pipeline, of several and of a split, each in its best arrangement, as
the simulator has them, and with one thing changed: several pipelines that get a fixed part of the requests each, a
microbatch whose rows all have one length, prompts that run ahead without limit (the original simulators have all
three); and two pipelines, however many would fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from check_rehearsal import config_of

from dejavu.config import Config
from dejavu.errors import InfeasibleError
from dejavu.planning.costs import Costs
from dejavu.planning.shape import ModelShape
from dejavu.request import Request
from dejavu.sim.arrangements import Arrangement, Case, arrangements, guessed_s
from dejavu.sim.simulation import simulate
from dejavu.workflows.plan import model_shape
from dejavu.workflows.simulation_comparison import arranged, fitting
from dejavu.workflows.simulation_inputs import costs_of, machinery_of, requests_of, setting_of, sorted_out

CASES: Sequence[Case] = ("baseline", "baseline_dp", "disaggregated")
NUM_SIMULATED = 3
AHEAD = 8
"""So many rounds of microbatches may be ahead where memory does not count: more than any prompt pipeline fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What is not as in the simulator."""

    name: str
    fixed_parts: bool = False
    one_length: bool = False
    unlimited: bool = False
    two_pipelines: bool = False


VARIANTS = (
    Assumptions(name="as simulated"),
    Assumptions(name="a fixed part of the requests for each pipeline", fixed_parts=True),
    Assumptions(name="one length in a microbatch", one_length=True),
    Assumptions(name="prompts run ahead without limit", unlimited=True),
    Assumptions(name="all three", fixed_parts=True, one_length=True, unlimited=True),
    Assumptions(name="several pipelines are two", two_pipelines=True),
    Assumptions(name="all four", fixed_parts=True, one_length=True, unlimited=True, two_pipelines=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A model, its times and a workload."""

    config: Config
    shape: ModelShape
    costs: Costs
    requests: Sequence[Request]


def main(arguments: Sequence[str]) -> int:
    """The table is on the terminal. Always 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="fig21")
    parser.add_argument("--machines", action="append", type=int)
    parser.add_argument("--two", action="store_true", help="of the variants, those with two pipelines alone")
    parser.add_argument("overrides", nargs="*", help="such as workload.num_requests=256")
    options = parser.parse_args(arguments)
    config = config_of((f"experiment={options.experiment}", *options.overrides))
    shape, codec = model_shape(config)
    requests, _ = sorted_out(requests_of(config, codec, shape.vocab_size), shape.max_length)
    asked = Asked(config=config, shape=shape, costs=costs_of(config, shape), requests=requests)
    for machines in options.machines or (8, 16):
        print(f"{machines} machines:                                   one  several    split  one/split  several/split")
        for variant in (one for one in VARIANTS if one.two_pipelines or not options.two):
            one, several, split = (shortest_s(asked, case, machines, variant) for case in CASES)
            print(
                f"  {variant.name:46} {one:7.1f}  {several:7.1f}  {split:7.1f}  {one / split:9.2f}  "
                f"{several / split:13.2f}",
                flush=True,
            )
    return 0


def shortest_s(asked: Asked, case: Case, machines: int, variant: Assumptions) -> float:
    """The makespan of the best arrangement; of those that look best, three are simulated."""
    found = sorted(fitted(asked, case, machines, variant), key=lambda one: guess_s(asked, *one))
    times_s = [makespan_s(asked, one, own, variant) for one, own in found[:NUM_SIMULATED]]
    return min(times_s, default=float("nan"))


def fitted(asked: Asked, case: Case, machines: int, variant: Assumptions) -> Iterator[tuple[Arrangement, Config]]:
    """What fits in memory; what only holds tokens ahead need not, where memory does not count."""
    config = asked.config
    for one in arrangements(case, machines, config.simulate.compare.microbatches, asked.shape.num_layers):
        if variant.two_pipelines and one.replicas > 2:
            continue
        try:
            own = fitting(config, asked.shape, one)
        except InfeasibleError:
            continue
        if variant.unlimited and not one.depth:
            free = replace(config, cluster=replace(config.cluster, device_memory_gb=None))
            own = arranged(free, one, AHEAD * machines)
        yield one, own


def guess_s(asked: Asked, one: Arrangement, own: Config) -> float:
    """See ``guessed_s``."""
    overhead, in_flight = machinery_of(own).streaming_overhead, own.strategy.in_flight
    return guessed_s(one, asked.requests, asked.costs, overhead=overhead, handover_s=0.0, in_flight=in_flight)


def makespan_s(asked: Asked, one: Arrangement, own: Config, variant: Assumptions) -> float:
    """Of one arrangement, under the variant's assumptions."""
    setting = setting_of(own, asked.shape, asked.costs)
    requests = list(asked.requests)
    if variant.one_length:
        requests = evened(requests, max(asked.config.simulate.compare.microbatches))
    if one.replicas == 1 or not (variant.fixed_parts or variant.one_length):
        return simulate(setting, requests).makespan_s
    batches = [requests[at : at + one.rows] for at in range(0, len(requests), one.rows)]
    alone = replace(setting, replicas=1)
    return max(
        simulate(alone, part).makespan_s for part in shared_out(batches, one.replicas, fixed=variant.fixed_parts)
    )


def shared_out(batches: Sequence[Sequence[Request]], replicas: int, *, fixed: bool) -> list[list[Request]]:
    """Whole microbatches for each pipeline: in turn, or to whoever has least to do, as out of a shared queue."""
    parts: list[list[Request]] = [[] for _ in range(replicas)]
    steps = [0] * replicas
    for number, batch in enumerate(batches):
        chosen = number % replicas if fixed else steps.index(min(steps))
        parts[chosen] += batch
        steps[chosen] += max(request.max_tokens for request in batch)
    return [part for part in parts if part]


def evened(requests: Sequence[Request], rows: int) -> list[Request]:
    """Each row has the length of its microbatch's first, in the largest microbatches that there are."""
    return [
        msgspec.structs.replace(request, max_tokens=requests[number - number % rows].max_tokens)
        for number, request in enumerate(requests)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
