"""A stage's memory for steps, as the plan wants it."""

from __future__ import annotations

from functools import partial

from dejavu.engine.host import Host
from dejavu.engine.step_memory import Resident, StepMemory, Swapped
from dejavu.kv.device import copier_for
from dejavu.kv.swapper import EmulatedBus, Swapper, SwapSpan


def swapped_or_resident(host: Host, *, are_copied: bool) -> StepMemory | None:
    """Slots with empty contents where the plan swaps, else the pool itself; None for a stage that keeps no rows.

    ``are_copied``: whether copies of steps leave the stage.
    """
    held, slots, pipeline = host.kept.held, host.kept.slots, host.place.pipeline
    if held is None:
        return None
    if slots is None:
        return Resident(held.pool, pipeline.microbatch_rows)
    swapper = Swapper(
        held.pool,
        slots,
        pipeline.microbatch_rows,
        copier=copier_for(host.plan.device),
        now=host.recorder.now,
        on_span=partial(_on_timeline, host),
        bus=None if host.plan.bus_bytes_per_s is None else EmulatedBus(host.plan.bus_bytes_per_s, host.clock.sleep),
        timeout_s=host.plan.timeout_s,
    )
    return Swapped(
        swapper,
        held.rows,
        slots,
        num_microbatches=pipeline.in_flight,
        microbatch_rows=pipeline.microbatch_rows,
        are_copied=are_copied,
        now=host.recorder.now,
    )


def _on_timeline(host: Host, span: SwapSpan) -> None:
    duration_s = span.end_s - span.start_s
    if span.name == "swap_wait":
        args = {} if span.microbatch is None else {"microbatch": span.microbatch}
        host.recorder.add(span.name, "wait", span.start_s, duration_s, **args)
        # On the main thread: a rehearsal must not take the wait for time in which its device computed.
        host.kept.pace.idle()
    else:
        assert span.microbatch is not None
        host.recorder.add(span.name, "swap", span.start_s, duration_s, microbatch=span.microbatch, bytes=span.num_bytes)
