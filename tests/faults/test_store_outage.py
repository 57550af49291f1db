"""etcd killed, frozen or wiped with requests running: they finish, and everybody registers again (field report B16).

A worker that dies afterwards, or while etcd is frozen, is noticed all the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dejavu.control.member import decode_member
from dejavu.request import Request
from dejavu.store import Keys, StoreClient, StoreUnavailable

from harness.cluster_kit import Kit, cluster, ragged_requests, reference_tokens, tokens_of
from harness.judge import Tokens, WhenCounted, assert_right
from harness.launched import eventually
from harness.store_server import StoreServer

TTL_S = 2


def during(outage: Callable[[], None], kit: Kit) -> None:
    """Requests are served before, through and after the outage, and their tokens are right."""
    thread = threading.Thread(target=outage)
    thread.start()
    served = 0
    while thread.is_alive() or served == 0:
        assert tokens_of(kit.serve(long_requests(kit))) == expected(kit)
        served += 1
    thread.join()


def long_requests(kit: Kit) -> list[Request]:
    return ragged_requests(16, vocab_size=kit.plan.model.vocab_size, seed=3, max_tokens=50)


_EXPECTED: dict[Path, Tokens] = {}


def expected(kit: Kit) -> Tokens:
    if kit.folder not in _EXPECTED:
        _EXPECTED[kit.folder] = reference_tokens(kit.folder, long_requests(kit))
    return _EXPECTED[kit.folder]


def registered(client: StoreClient, keys: Keys) -> int:
    try:
        entries = client.get_prefix(keys.workers_prefix).entries
    except StoreUnavailable:
        return 0
    return sum(decode_member(entry.value).state == "serving" for entry in entries)


@pytest.mark.faults
@pytest.mark.parametrize(
    "fault", [*(pytest.param(fault, marks=pytest.mark.grid) for fault in ("kill", "freeze")), "wipe"]
)
def test_requests_finish_through_an_outage_workers_register_again_and_a_dead_one_is_replaced(
    fault: str, tmp_path: Path
) -> None:
    server = StoreServer(tmp_path)
    server.start()
    pause = threading.Event()

    def outage() -> None:
        if fault == "freeze":
            with server.frozen():
                pause.wait(10.0)
            return
        server.wipe() if fault == "wipe" else server.kill()
        pause.wait(3.0)
        server.start()

    keys, client = Keys("dejavu"), StoreClient(server.spec)
    try:
        with cluster(
            tmp_path / "output",
            "model=tiny-llama",
            "store=external",
            f"store.endpoints=[{server.endpoint}]",
            f"cluster.lease_ttl_s={TTL_S}",
            "strategy.may_grow=false",
        ) as kit:
            during(outage, kit)
            eventually(lambda: registered(client, keys) == 2, "both workers registered again", 2 * TTL_S + 4.0)
            eventually(lambda: client.get(keys.plan) is not None, "the plan is back", 5.0)
            victim = decode_member(client.get_prefix(keys.workers_prefix).entries[0].value)

            def strike() -> None:
                # The failure is noticed whether the store answers meanwhile or only comes back.
                with server.frozen() if fault == "freeze" else contextlib.nullcontext():
                    os.kill(victim.pid, signal.SIGKILL)
                    pause.wait(3.0)

            striking = threading.Thread(target=strike)
            served = kit.run(long_requests(kit), watcher=WhenCounted(kit, 60, striking.start), dead={victim.name})
            striking.join()
            assert_right(served, expected(kit))
            assert [journal.how for journal in served.journals] == [{victim.name: "replan"}]
    finally:
        client.close()
        server.kill()
