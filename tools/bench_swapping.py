"""What swapping costs and gives one stage: steps of B rows, of B rows swapped and of 2B rows swapped, in turn.

One process, one stage with half of the model's layers, four microbatches in the order of the ring; no cluster. In wall
time the copies may be hidden where a core is idle; processor time has them in any case.

    python tools/bench_swapping.py --model smollm2-135m --batches 1 2 4
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median

import torch

from dejavu.config import ModelConfig
from dejavu.control.plan import Pipeline, Place, Stage
from dejavu.control.ring import StepRow
from dejavu.engine.compute import StageCompute
from dejavu.engine.messages import PromptRow
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.step_memory import Resident, StepMemory, Swapped
from dejavu.ids import RowId, WorkerName
from dejavu.kv.device import CpuCopier
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.slots import NUM_SLOTS
from dejavu.kv.swapper import Swapper
from dejavu.models.spec import ModelSpec
from dejavu.models.stage import StageModel
from dejavu.report.progress import SilentProgress
from dejavu.workflows.preparation import prepare_model

_MICROBATCHES = 4
_TOKEN = 7


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds a new token."""

    wall_s: float
    processor_s: float


class Bench:
    """A stage with rows of ``tokens`` positions in every place."""

    def __init__(self, model: StageModel, rows: int, tokens: int, most_steps: int, *, swapping: bool) -> None:
        layout, layers = model.spec.layout, model.layers
        stage = Stage(worker=WorkerName("w0"), index=0, layers=layers)
        pipeline = Pipeline(kind="colocated", stages=(stage,), microbatch_rows=rows, in_flight=_MICROBATCHES)
        pool = KvPool(layout, layers, pipeline.num_rows)
        with torch.inference_mode():
            pool.cells_LCRHSD[..., : tokens + most_steps, :].normal_()
        self._table = PoolRows(rows)
        self._rows = rows
        self._tokens = tokens
        self.memory: StepMemory = Resident(pool, rows)
        if swapping:
            slots = KvPool(layout, layers, NUM_SLOTS * rows)
            swapper = Swapper(pool, slots, rows, copier=CpuCopier(), now=time.monotonic)
            self.memory = Swapped(
                swapper, self._table, slots, num_microbatches=_MICROBATCHES, microbatch_rows=rows, are_copied=False,
                now=time.monotonic,
            )  # fmt: skip
        place = Place(pipeline=pipeline, stage=stage)
        self._compute = StageCompute(model, place, pool=pool, step_pool=self.memory.pool)
        self.reset()

    def reset(self) -> None:
        """Every row has its first positions and no more."""
        for microbatch in range(_MICROBATCHES):
            rows = [self._row_id(microbatch, index) for index in range(self._rows)]
            self.memory.settle(
                self._table.begin(
                    [PromptRow(row_id, microbatch, index, self._tokens, None) for index, row_id in enumerate(rows)]
                )
            )
            for row_id in rows:
                self._table.written(row_id, self._tokens)

    def run(self, num_steps: int) -> Taken:
        """So many steps of every microbatch, one microbatch after the other."""
        wall_s, processor_s = time.perf_counter(), time.process_time()
        for step in range(num_steps):
            for microbatch in range(_MICROBATCHES):
                position = self._tokens + step
                rows = [
                    StepRow(self._row_id(microbatch, index), index, position, _TOKEN, None)
                    for index in range(self._rows)
                ]
                first_row = self.memory.begin(microbatch, rows)
                self._compute.step(first_row, rows, None)
                self.memory.end(microbatch, rows)
                for row in rows:
                    self._table.written(row.row_id, position + 1)
        count = num_steps * _MICROBATCHES * self._rows
        return Taken((time.perf_counter() - wall_s) / count, (time.process_time() - processor_s) / count)

    def _row_id(self, microbatch: int, index: int) -> RowId:
        return RowId(microbatch * self._rows + index)


def compare(spec: ModelSpec, batch: int, tokens: int, steps: int, rounds: int) -> None:
    """The table's line of one B."""
    model = StageModel.load(spec, LayerRange(0, (spec.num_layers + 1) // 2))
    benches = {
        "B": Bench(model, batch, tokens, steps, swapping=False),
        "B swapped": Bench(model, batch, tokens, steps, swapping=True),
        "2B swapped": Bench(model, 2 * batch, tokens, steps, swapping=True),
    }
    names = list(benches)
    taken: dict[str, list[Taken]] = {name: [] for name in names}
    for round_index in range(-1, rounds):
        first = max(round_index, 0) % len(names)
        for name in [*names[first:], *names[:first]]:
            benches[name].reset()
            one = benches[name].run(steps)
            if round_index >= 0:
                taken[name].append(one)
    for bench in benches.values():
        bench.memory.close()
    for name in names:
        gains = [_gains(resident, own) for resident, own in zip(taken["B"], taken[name], strict=True)]
        swap = benches[name].memory.counters
        print(
            f"B={batch:<3} {name:11} {median(one.wall_s for one in taken[name]) * 1e3:8.2f} ms/token "
            f"{median(gain[0] for gain in gains):6.2f}x wall {median(gain[1] for gain in gains):6.2f}x processor "
            f"{swap.steps:6} steps waited {swap.waits} times, {swap.wait_s:.3f} s; copied {swap.busy_s:.3f} s, "
            f"{swap.own_s:.3f} s of them on the computing thread"
        )


def _gains(resident: Taken, own: Taken) -> tuple[float, float]:
    return resident.wall_s / own.wall_s, resident.processor_s / own.processor_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=96, help="positions of a row before its first step")
    parser.add_argument("--steps", type=int, default=8, help="of each microbatch in a round")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """The table is printed."""
    arguments = _arguments()
    # The copying thread must not bring threads of its own.
    torch.set_num_threads(1)
    config = ModelConfig(kind=arguments.model, max_length=arguments.tokens + arguments.steps + 1)
    spec = prepare_model(config, SilentProgress())
    for batch in arguments.batches:
        compare(spec, batch, arguments.tokens, arguments.steps, arguments.rounds)


if __name__ == "__main__":
    main()
