"""Repairs that go wrong on the way, and workers that were declared dead and live: still the right tokens, once each."""

from __future__ import annotations

import random

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.engine import messages as m
from dejavu.errors import Fatal
from dejavu.ids import RequestId
from dejavu.kv.chunk import decode_message
from dejavu.request import Completion, Request, Sampling
from dejavu.transport.base import Hello, LinkRefused

from harness.deaths import Death, Deaths, says, step_done
from harness.local_cluster import Killed, LocalCluster, local_cluster
from harness.local_worker import Worker
from harness.oracle import Oracle, ragged_requests, random_prompt


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of("llama", tmp_path_factory.mktemp("models"))


def colocated(replication: int, depth: int = 3, **others: object) -> Declared:
    values = {"prompt_rows": 2, "token_rows": 2, "in_flight": 2, "scheduling": "row", "timeout_s": 30.0, **others}
    return Declared(mode="colocated", colocated_depth=depth, replication=replication, **values)  # type: ignore[arg-type]


def split(replication: int, prompt: int = 1, token: int = 2) -> Declared:
    return Declared(
        mode="disaggregated",
        prompt_depth=prompt,
        token_depth=token,
        prompt_rows=2,
        token_rows=2,
        in_flight=2,
        scheduling="row",
        timeout_s=30.0,
        replication=replication,
    )


def long_requests(num_requests: int = 4, **others: object) -> list[Request]:
    """Requests that are under way for ten steps and more."""
    chooser = random.Random(num_requests)
    return [
        Request(
            id=RequestId(f"long{index}"),
            prompt_tokens=random_prompt(chooser, chooser.randint(1, 18)),
            max_tokens=chooser.randint(11, 14),
            **{"ignore_eos": True, **others},  # type: ignore[arg-type]
        )
        for index in range(num_requests)
    ]


def tokens_of(completions: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {request_id: completion.tokens for request_id, completion in completions.items()}


def test_two_neighbours_that_die_together_are_restored_from_the_third_with_two_copies(llama: Oracle) -> None:
    requests = long_requests()
    tap = Deaths(Death("w1", step_done(5), others=("w2",)))
    with local_cluster(colocated(2), llama.spec, tap=tap) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert all(rows == [] for rows in cluster.held().values())
    (receipt,) = cluster.receipts
    assert receipt.rows == {"replica": 4}
    assert receipt.bytes_replicated > receipt.bytes_restored > 0


def test_rows_whose_holder_died_with_their_stage_are_computed_again(llama: Oracle) -> None:
    requests = long_requests()
    tap = Deaths(Death("w1", step_done(5), others=("w2",)))
    with local_cluster(colocated(1), llama.spec, tap=tap) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
    assert [receipt.rows for receipt in cluster.receipts] == [{"recompute": 4}]


@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
@pytest.mark.parametrize("kind", [m.Holdings, m.RowReady], ids=lambda kind: kind.__name__)
def test_a_worker_that_dies_while_another_is_restored_costs_another_epoch(
    llama: Oracle, worker: str, kind: type[m.Message]
) -> None:
    """At the questions of the restore, or when its rows are whole again."""
    requests = long_requests()
    second = "w2" if worker == "w1" else "w1"
    tap = Deaths(Death(worker, step_done(5)), Death(second, says(kind)))
    with local_cluster(colocated(2), llama.spec, tap=tap) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert tap.are_over
        assert cluster.plan.epoch == 3
        assert all(rows == [] for rows in cluster.held().values())


def test_the_replacement_that_dies_when_it_is_to_send_what_it_holds_is_replaced(llama: Oracle) -> None:
    requests = long_requests()
    tap = Deaths(Death("w1", step_done(5)), Death("w1", says(m.Holdings)), Death("w1", says(m.RowReady)))
    with local_cluster(colocated(1), llama.spec, tap=tap) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert tap.are_over
        assert cluster.plan.epoch == 4


class LateLastToken:
    """The last stage's word about a row's last token never reaches the controller: it dies once stage 0 has heard it,
    and stage 0 has given the row's place back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.is_over = False

    def __call__(self, sender: str, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        if header[:1] != m.CONTROL or self.is_over:
            return [(header, payload)]
        message = m.decode(header)
        if isinstance(message, m.StepTokens) and (sender, peer) == ("w2", "controller"):
            return [] if message.step == self._limit - 1 else [(header, payload)]
        if isinstance(message, m.RowsEnded):
            self.is_over = True
            raise Killed("w2")
        return [(header, payload)]


@pytest.mark.parametrize("replication", [0, 1])
def test_an_end_that_overtakes_its_last_token_at_the_failure_loses_no_token(llama: Oracle, replication: int) -> None:
    (request,) = long_requests(1)
    tap = LateLastToken(request.max_tokens)
    with local_cluster(colocated(replication), llama.spec, tap=tap) as cluster:
        assert cluster.serve([request])[request.id].tokens == llama.tokens(request)
        assert tap.is_over
        more = ragged_requests(6, seed=1)
        assert tokens_of(cluster.serve(more)) == llama.all_tokens(more), "its place can be used again"


def test_a_worker_that_fails_again_and_again_ends_the_requests_under_way_and_the_others_are_served(
    llama: Oracle,
) -> None:
    requests = [*long_requests(1), *ragged_requests(3, seed=6)]
    deaths = [Death("w1", says(m.StepActivations)), *(Death("w1", says(m.StepActivations)) for _ in range(2))]
    with local_cluster(colocated(1, in_flight=1, token_rows=1, prompt_rows=1), llama.spec, tap=Deaths(*deaths)) as one:
        completions = one.serve(requests)
        assert one.plan.epoch == 4
    assert completions["long0"].finish_reason == "error" or completions["long0"].tokens == llama.tokens(requests[0])
    others = requests[1:]
    assert {other.id: completions[other.id].tokens for other in others} == llama.all_tokens(others)


def test_sampled_rows_draw_the_same_tokens_after_a_failure(llama: Oracle) -> None:
    params = [Sampling(temperature=0.9, seed=3), Sampling(temperature=1.2, top_k=30, seed=4), Sampling()]
    requests = [
        Request(
            id=RequestId(f"s{index}"),
            prompt_tokens=random_prompt(random.Random(index), 7),
            max_tokens=12,
            sampling=params[index % 3],
            ignore_eos=True,
        )
        for index in range(4)
    ]
    expected = llama.all_tokens(requests)
    for recovery in ("replica", "recompute", "restart"):
        tap = Deaths(Death("w2", step_done(4)), Death("w0", step_done(8)))
        with local_cluster(colocated(1, recovery=recovery), llama.spec, tap=tap) as cluster:
            assert tokens_of(cluster.serve(requests)) == expected
            assert tap.are_over


@pytest.mark.parametrize("recovery", ["replica", "recompute", "restart"])
def test_eos_and_stop_strings_end_their_requests_across_a_failure(llama: Oracle, recovery: str) -> None:
    requests = long_requests(ignore_eos=False)
    plain = {request.id: llama.tokens(request) for request in requests}
    eos = plain["long0"][7]
    spec = llama.spec_ending_at(eos)
    expected = {name: _until(tokens, eos) for name, tokens in plain.items()}
    stop = llama.codec.decode(expected["long1"][:7])[-1]
    requests[1] = Request(
        id=requests[1].id,
        prompt_tokens=requests[1].prompt_tokens,
        max_tokens=requests[1].max_tokens,
        stop=(stop,),
        ignore_eos=True,
    )
    with local_cluster(colocated(1, recovery=recovery), spec, codec=llama.codec) as calm:
        without = calm.serve(requests)
    tap = Deaths(Death("w1", step_done(5)))
    with local_cluster(colocated(1, recovery=recovery), spec, codec=llama.codec, tap=tap) as cluster:
        completions = cluster.serve(requests)
        assert tap.are_over or len(plain["long0"]) < 6
    for name, line in without.items():
        after = completions[name]
        assert (after.tokens, after.text, after.finish_reason) == (line.tokens, line.text, line.finish_reason)
    assert tokens_of(completions)["long0"] == expected["long0"]


def _until(tokens: tuple[int, ...], eos: int) -> tuple[int, ...]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
def test_copies_at_a_memory_stage_restore_a_stage_and_the_memory_stage_is_replaced_too(
    llama: Oracle, worker: str
) -> None:
    requests = long_requests()
    death = Death(worker, step_done(5)) if worker != "w2" else Death("w1", step_done(5), others=("w2",))
    alone = [death] if worker != "w2" else [Death("w0", says(m.StepTokens)), death]
    with local_cluster(colocated(0, depth=2, stream_to="memory"), llama.spec, tap=Deaths(*alone)) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert all(rows == [] for rows in cluster.held().values())
    if worker != "w2":
        assert cluster.receipts[0].rows == {"replica": 4}


class Zombie:
    """A worker that is declared dead in the middle of a run, lives, and is heard again once others go on without it."""

    def __init__(self, cluster: LocalCluster, name: str, step: int) -> None:
        self.worker: Worker = cluster.operator.workers[name]
        self.num_heard = 0
        self._cluster = cluster
        cluster.at_step(0, step, lambda: cluster.operator.declare_dead(name))
        cluster.at_phase("resume", self._speak)

    def _speak(self) -> None:
        self.num_heard = self.worker.node.gate.open()

    def num_refused(self) -> int:
        """Messages of its epoch that others dropped, KV aside."""
        nodes = [worker.node for worker in self._cluster.workers]
        return sum(node.mailbox.num_stale for node in (*nodes, self._cluster.controller_node))


@pytest.mark.parametrize(
    ("declared", "name"),
    [(colocated(1), "w0"), (colocated(2), "w1"), (colocated(1), "w2"), (split(1), "w1"), (split(1), "w2")],
    ids=["colocated-w0", "colocated-w1", "colocated-w2", "split-w1", "split-w2"],
)
def test_nothing_is_taken_of_a_worker_that_was_declared_dead_and_wakes(
    llama: Oracle, declared: Declared, name: str
) -> None:
    requests, seen = long_requests(6), Deaths()
    with local_cluster(declared, llama.spec, tap=seen) as cluster:
        zombie = Zombie(cluster, name, step=4)
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert zombie.num_heard > 0
        counters = cluster.counters()
        stale_kv = sum(worker.kv.get("stale", 0) for worker in counters.values())
        assert zombie.num_refused() + stale_kv > 0
        assert all(rows == [] for rows in cluster.held().values())

        hello = Hello(cluster="in-process", name=name, incarnation=zombie.worker.node.incarnation, epoch=1)
        for worker in cluster.workers:
            with pytest.raises(LinkRefused, match="epoch 1 is not in force here; 2 is"):
                zombie.worker.node.transport.connect(worker.node.address, hello, peer=worker.name, timeout_s=5.0)

        zombie.worker.is_blind = False
        zombie.worker.look_up()
        zombie.worker.thread.join(30.0)
        assert isinstance(zombie.worker.problem, Fatal)
        assert "declared dead before epoch 2" in str(zombie.worker.problem)


def test_copies_and_handoffs_of_an_old_epoch_are_dropped_as_stale(llama: Oracle) -> None:
    """The very messages of epoch 1 come again in epoch 2, from somebody with a link."""
    letters: list[tuple[str, str, bytes, bytes]] = []

    def tap(sender: str, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        if header[:1] != m.CONTROL and decode_message(header).epoch == 1:
            letters.append((sender, peer, header, payload))
        return [(header, payload)]

    requests, again = long_requests(6), []
    with local_cluster(split(1), llama.spec, tap=tap) as cluster:

        def repeat() -> None:
            again.extend(letters)
            for sender, peer, header, payload in again:
                peers = cluster.operator.workers[sender].node.peers
                assert peers is not None
                peers.send(peer, header, (memoryview(payload),)).result(30.0)

        cluster.at_step(0, 4, lambda: cluster.fail("w2"))
        cluster.at_phase("resume", repeat)
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        counters = cluster.counters()
        assert {sender for sender, *_ in again} == {"w0", "w1", "w2"}
        num_chunks = sum(len(decode_message(header).chunks) for _, _, header, _ in again)
        assert sum(worker.kv.get("stale", 0) for worker in counters.values()) >= num_chunks
        assert all(rows == [] for rows in cluster.held().values())
