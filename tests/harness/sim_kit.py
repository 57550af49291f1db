"""Small clusters to simulate."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.control.placement import Declared, place
from dejavu.control.plan import Mode, Plan, RecoveryTier, Scheduling
from dejavu.ids import Epoch, RequestId
from dejavu.planning.costs import GivenCosts
from dejavu.request import Request

from harness.plans import made_up_spec

NUM_LAYERS = 12
POSITION_BYTES = 2 * 2 * 8 * 4
"""K and V of one position in one layer of the made-up model."""


def sim_plan(
    mode: Mode,
    *,
    depth: int = 4,
    split: tuple[int, int] = (1, 1),
    rows: int = 1,
    in_flight: int | None = None,
    scheduling: Scheduling = "microbatch",
    replication: int = 0,
    recovery: RecoveryTier = "replica",
    standby: int = 0,
    copy_steps: int = 1,
) -> Plan:
    """A plan whose stages are equal: twelve layers, and depths that divide them."""
    declared = Declared(
        mode=mode,
        prompt_depth=split[0],
        token_depth=split[1],
        colocated_depth=depth,
        prompt_rows=rows,
        token_rows=rows,
        in_flight=in_flight,
        scheduling=scheduling,
        replication=replication,
        recovery=recovery,
        num_standby=standby,
        copy_steps=copy_steps,
    )
    return place(declared, made_up_spec(num_layers=NUM_LAYERS, max_length=4096), epoch=Epoch(1))


def costs(prompt_s: float, token_s: float, rows: int = 1) -> GivenCosts:
    """Y and t of a microbatch of ``rows``."""
    return GivenCosts(rows=rows, whole_prompt_time_s=prompt_s, whole_token_time_s=token_s)


def asked(new_tokens: Sequence[int], *, prompt: int = 1, arrival_s: Sequence[float] | None = None) -> list[Request]:
    """A request for each number of new tokens."""
    times_s = arrival_s or [0.0] * len(new_tokens)
    return [
        Request(id=RequestId(f"r{number}"), prompt_tokens=(0,) * prompt, max_tokens=new, arrival_s=at_s)
        for number, (new, at_s) in enumerate(zip(new_tokens, times_s, strict=True))
    ]
