"""Between a worker's death and the moment when somebody knows of it: nothing is given up, and nothing is used up."""

from __future__ import annotations

import random
import threading

import msgspec
import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.control.plan import Plan
from dejavu.control.replan import Dead
from dejavu.engine import messages as m
from dejavu.ids import RequestId
from dejavu.request import Request

from harness.deaths import Deaths
from harness.local_cluster import local_cluster
from harness.local_operator import new_process_or_standby
from harness.oracle import Oracle, random_prompt


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of("llama", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("replication", [0, 1])
@pytest.mark.parametrize("name", ["w1", "w2"])
def test_prompts_whose_kv_finds_its_stage_dead_wait_for_the_repair_and_use_up_no_attempt(
    llama: Oracle, name: str, replication: int
) -> None:
    """Three attempts were made and failed before anybody had found out that the stage was dead."""
    chooser, kv_left_in_vain, is_dead = random.Random(5), threading.Event(), threading.Event()
    requests = [
        Request(
            id=RequestId(f"r{index}"), prompt_tokens=random_prompt(chooser, 9), max_tokens=8 - index, ignore_eos=True
        )
        for index in range(4)
    ]
    seen = Deaths()

    def once_it_is_felt(plan: Plan, dead: Dead) -> Plan:
        is_dead.set()
        assert kv_left_in_vain.wait(30.0)
        return new_process_or_standby(plan, dead)

    def tap(sender: str, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        if header[:1] != m.CONTROL and (sender, peer) == ("w0", name) and is_dead.is_set():
            kv_left_in_vain.set()
        return seen(sender, peer, header, payload)

    declared = Declared(
        mode="disaggregated",
        token_depth=2,
        prompt_rows=1,
        token_rows=2,
        in_flight=2,
        scheduling="row",
        timeout_s=30.0,
        replication=replication,
    )
    with local_cluster(declared, llama.spec, tap=tap, policy=once_it_is_felt) as cluster:

        def die() -> None:
            cluster.fail(name)
            assert is_dead.wait(30.0)

        cluster.at_phase("handoff", die)
        late = [msgspec.structs.replace(request, arrival_s=0.001) for request in requests[1:]]
        completions = cluster.serve([requests[0], *late])
    assert {one: line.tokens for one, line in completions.items()} == llama.all_tokens(requests)
    assert seen.sent(m.RowsFailed) == []
