"""A stage's passes: a prompt microbatch or a step is computed, its KV leaves, its result goes to whoever needs it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from dejavu.control.ring import StepRow
from dejavu.engine import messages as m
from dejavu.engine.compute import Sampled, StageCompute, buffer_of, prompt_ids, tensor_of
from dejavu.engine.host import Host
from dejavu.engine.outflow import Outflow
from dejavu.engine.peers import CONTROLLER
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.step_memory import StepMemory
from dejavu.transport.base import Buffer


class Passes:
    """Main thread only.

    Args:
        rows: what lies in the stage's pool; None where there is none.
        memory: where steps have their KV; None where there are none.
        out: takes the KV that leaves this stage.
    """

    def __init__(
        self, host: Host, compute: StageCompute, rows: PoolRows | None, memory: StepMemory | None, out: Outflow
    ) -> None:
        self._host = host
        self._compute = compute
        self._rows = rows
        self._memory = memory
        self._out = out

    def prompt(self, message: m.RunPrompt | m.PromptActivations, payload: Buffer) -> None:
        """The prompts are computed here, and the next stage or the controller has the result."""
        rows = message.rows
        if isinstance(message, m.RunPrompt):
            inputs = prompt_ids(payload, len(rows), self._host.model.device)
        else:
            inputs = self._hidden(payload, max(row.length for row in rows), len(rows))
        if self._rows is not None:
            places = self._rows.begin(rows)
            self._out.begin(places)
            if self._memory is not None:
                self._memory.settle(places)
        with self._host.meter.computing("prompt", rows=len(rows), tokens=sum(row.length for row in rows)):
            output = self._compute.prompt(rows, inputs, self._out.on_layer(rows), self._out.on_written(rows))
            sampled = self._compute.sample_prompt(rows, output) if self._host.place.is_last else Sampled()
        if self._rows is not None:
            for row in rows:
                self._rows.written(row.row_id, row.length)
        if self._memory is not None:
            self._memory.prompts(rows)
        if self._host.place.is_last:
            row_ids = tuple(row.row_id for row in rows)
            done = m.PromptTokens(
                epoch=message.epoch, row_ids=row_ids, tokens=sampled.tokens, logprobs=sampled.logprobs
            )
            self._host.tell(CONTROLLER, done)
        else:
            self._pass_on(m.PromptActivations(epoch=message.epoch, rows=rows), output)
        self._out.end_pass()

    def step(
        self, microbatch: int, step: int, rows: tuple[StepRow, ...], payload: Buffer | None
    ) -> m.StepTokens | None:
        """The step is computed here, and the next stage or the controller has the result.

        Returns the tokens on the last stage, for stage 0.
        """
        assert self._memory is not None
        inputs = None if payload is None else self._hidden(payload, 1)
        first_row = self._memory.begin(microbatch, rows)
        with self._host.meter.computing("step", microbatch=microbatch, step=step, rows=len(rows)):
            output = self._compute.step(first_row, rows, inputs)
            sampled = self._compute.sample_step(rows, output) if self._host.place.is_last else Sampled()
        self._memory.end(microbatch, rows)
        if self._rows is not None:
            for row in rows:
                self._rows.written(row.row_id, row.position + 1)
        self._out.step(microbatch, step, rows)
        epoch = self._host.plan.epoch
        if not self._host.place.is_last:
            self._pass_on(m.StepActivations(epoch=epoch, microbatch=microbatch, step=step, rows=rows), output)
            return None
        row_ids = tuple(row.row_id for row in rows)
        done = m.StepTokens(
            epoch=epoch,
            microbatch=microbatch,
            step=step,
            row_ids=row_ids,
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
        )
        self._host.tell(CONTROLLER, done)
        # Stage 0 has no use for the rest.
        return msgspec.structs.replace(done, logprobs=()) if sampled.logprobs else done

    def _pass_on(self, message: m.PromptActivations | m.StepActivations, hidden: Tensor) -> None:
        assert self._host.place.next_worker is not None
        self._host.tell(self._host.place.next_worker, message, (buffer_of(hidden),))

    def _hidden(self, payload: Buffer, length: int, num_rows: int = -1) -> Tensor:
        shape: Sequence[int] = (num_rows, length, self._host.model.hidden_size)
        return tensor_of(payload, shape, self._host.model.dtype, self._host.model.device)
