"""A service over a cluster in one process: whoever comes and goes, the others get their tokens and nothing is kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.engine import messages as m
from dejavu.ids import RequestId, RowId
from dejavu.request import Request, Sampling
from dejavu.serving.service import Service

from harness.live import Heard, running_service
from harness.local_cluster import LocalCluster, local_cluster
from harness.oracle import Oracle, random_prompt

NUM_GIVEN_UP = 100
NUM_OTHERS = 20


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of("llama", tmp_path_factory.mktemp("models"))


def declared(mode: str, scheduling: str = "row", replication: int = 1) -> Declared:
    depths = {"colocated_depth": 2} if mode == "colocated" else {"prompt_depth": 1, "token_depth": 2}
    return Declared(
        mode=mode,  # type: ignore[arg-type]
        prompt_rows=2,
        token_rows=2,
        in_flight=2,
        scheduling=scheduling,  # type: ignore[arg-type]
        timeout_s=30.0,
        replication=replication,
        **depths,  # type: ignore[arg-type]
    )


def request(name: str, chooser: random.Random, max_tokens: int = 8, **others: object) -> Request:
    prompt = random_prompt(chooser, chooser.randint(1, 18))
    return Request(id=RequestId(name), prompt_tokens=prompt, max_tokens=max_tokens, **others)  # type: ignore[arg-type]


def giving_up(service: Service, request_id: RequestId, moment: object) -> Callable[[object], None]:
    """Gives the request up when it comes to that moment of its life."""

    def act(now: object) -> None:
        if now == moment:
            service.cancel(request_id)

    return act


class LateSteps:
    """A tap: which steps a row was part of after stage 0 had been told to let go of it."""

    def __init__(self) -> None:
        self.stage_0 = ""
        self.of_row: dict[RowId, set[int]] = {}

    def __call__(self, sender: str, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        message = m.decode(header) if header[:1] == m.CONTROL else None
        match message:
            case m.ReleaseRows() if peer == self.stage_0:
                self.of_row |= {row_id: set() for row_id in message.row_ids}
            case m.StepActivations() if sender == self.stage_0:
                for row in message.rows:
                    if row.row_id in self.of_row:
                        self.of_row[row.row_id].add(message.step)
        return [(header, payload)]


def check_nothing_is_kept(cluster: LocalCluster) -> None:
    ledger = cluster.controller._ledger
    assert (ledger.num_open, ledger.admission.num_waiting) == (0, 0)
    # Rows are given back when stage 0 says so; asking the workers takes longer than its word.
    held = cluster.held()
    assert {worker: [row.row_id for row in rows] for worker, rows in held.items()} == {worker: [] for worker in held}
    while (event := cluster.links.mailbox.take(0.0)) is not None:
        cluster.controller._handle(event)
    assert ledger.admission.num_rows_taken == 0


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(declared("disaggregated", "microbatch"), id="split, microbatches"),
        pytest.param(declared("colocated"), id="colocated, rows"),
        pytest.param(declared("disaggregated"), id="split, rows", marks=pytest.mark.grid),
        pytest.param(declared("colocated", "microbatch"), id="colocated, microbatches", marks=pytest.mark.grid),
    ],
)
def test_a_hundred_requests_given_up_at_random_moments_cost_the_others_nothing(llama: Oracle, shape: Declared) -> None:
    chooser = random.Random(1)
    others = [request(f"other{index}", chooser) for index in range(NUM_OTHERS)]
    doomed = [request(f"doomed{index}", chooser, max_tokens=20, ignore_eos=True) for index in range(NUM_GIVEN_UP)]
    moments = ["submitted", "started", "started", 1, 1, 2, 3, 5]
    order = [*others, *doomed]
    chooser.shuffle(order)
    heard: dict[str, Heard] = {}
    late_steps = LateSteps()
    with local_cluster(shape, llama.spec, tap=late_steps) as cluster:
        late_steps.stage_0 = cluster.plan.token_pipeline.stages[0].worker
        with running_service(cluster.controller) as service:
            for one in order:
                moment = chooser.choice(moments) if one in doomed else None
                heard[one.id] = Heard(giving_up(service, one.id, moment))
                service.submit(one, heard[one.id])
                if moment == "submitted":
                    service.cancel(one.id)
            lines = {request_id: one.wait() for request_id, one in heard.items()}
            counts = service.snapshot().counts
        check_nothing_is_kept(cluster)
    right = llama.all_tokens(others)
    assert {one.id: lines[one.id].tokens for one in others} == right
    assert {lines[one.id].finish_reason for one in doomed} == {"abort"}
    assert len(late_steps.of_row) > NUM_OTHERS
    # What is under way when the word comes is still computed.
    assert max(map(len, late_steps.of_row.values())) <= 2
    assert (counts.submitted, counts.finished, counts.aborted, counts.open) == (
        NUM_OTHERS + NUM_GIVEN_UP,
        NUM_OTHERS,
        NUM_GIVEN_UP,
        0,
    )


@pytest.mark.parametrize("phase", ["fence", "restore", pytest.param("resume", marks=pytest.mark.grid)])
@pytest.mark.parametrize("mode", ["disaggregated", pytest.param("colocated", marks=pytest.mark.grid)])
def test_requests_given_up_during_a_repair_are_gone_and_the_others_go_on(llama: Oracle, mode: str, phase: str) -> None:
    chooser = random.Random(2)
    requests = [request(f"r{index}", chooser, max_tokens=12, ignore_eos=True) for index in range(12)]
    # Some have rows when the worker dies, and some wait.
    doomed = requests[::3]
    with local_cluster(declared(mode), llama.spec) as cluster:
        victim = cluster.plan.token_pipeline.stages[1].worker
        cluster.at_step(0, 4, lambda: cluster.fail(victim))
        with running_service(cluster.controller) as service:
            cluster.at_phase(phase, lambda: [service.cancel(one.id) for one in doomed])
            heard = {one.id: Heard() for one in requests}
            for one in requests:
                service.submit(one, heard[one.id])
            lines = {request_id: one.wait() for request_id, one in heard.items()}
        check_nothing_is_kept(cluster)
    right = llama.all_tokens(requests)
    for one in requests:
        line = lines[one.id]
        if one in doomed:
            assert line.finish_reason == "abort"
            assert line.tokens == right[one.id][: len(line.tokens)]
        else:
            assert line.tokens == right[one.id]
    assert any(line.resumed for line in lines.values())


def test_a_listener_hears_the_text_up_to_the_stop_string_and_nothing_of_it(llama: Oracle) -> None:
    chooser = random.Random(3)
    plain = request("plain", chooser, max_tokens=20, ignore_eos=True)
    text = llama.codec.decode(llama.tokens(plain))
    stop = text[5:8]
    stopped = request("stopped", random.Random(3), max_tokens=20, ignore_eos=True, stop=(stop, "\x00never"))
    with (
        local_cluster(declared("disaggregated"), llama.spec, codec=llama.codec) as cluster,
        running_service(cluster.controller) as service,
    ):
        heard = [Heard(), Heard()]
        service.submit(plain, heard[0])
        service.submit(stopped, heard[1])
        lines = [one.wait() for one in heard]
    assert (lines[0].text, lines[0].finish_reason) == (text, "length")
    assert (lines[1].text, lines[1].finish_reason) == (text[: text.find(stop)], "stop")


def test_log_probabilities_come_for_those_who_ask_and_through_a_repair(llama: Oracle) -> None:
    chooser = random.Random(5)
    asking = request("asking", chooser, max_tokens=10, ignore_eos=True, sampling=Sampling(top_logprobs=3))
    drawn = request(
        "drawn", chooser, max_tokens=10, ignore_eos=True, sampling=Sampling(temperature=1.0, seed=3, top_logprobs=0)
    )
    plain = request("plain", chooser, max_tokens=10, ignore_eos=True)
    requests = [asking, drawn, plain]
    heard = {one.id: Heard() for one in requests}
    with local_cluster(declared("colocated"), llama.spec) as cluster:
        victim = cluster.plan.token_pipeline.stages[1].worker
        cluster.at_step(0, 4, lambda: cluster.fail(victim))
        with running_service(cluster.controller) as service:
            for one in requests:
                service.submit(one, heard[one.id])
            lines = {one.id: heard[one.id].wait() for one in requests}
    assert {one.id: lines[one.id].tokens for one in requests} == llama.all_tokens(requests)
    assert any(line.resumed for line in lines.values())
    assert heard["plain"].logprobs == [None] * 10
    for one in (asking, drawn):
        tokens = [*one.prompt_tokens, *lines[one.id].tokens]
        with torch.inference_mode():
            right_TV = llama.reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        for place, told in enumerate(heard[one.id].logprobs):
            at = len(one.prompt_tokens) + place
            assert told is not None
            assert told.chosen == pytest.approx(right_TV[at - 1, tokens[at]].item(), abs=1e-3)
            top = right_TV[at - 1].topk(one.sampling.top_logprobs or 0)
            assert [token for token, _ in told.top] == top.indices.tolist()


def test_a_request_whose_deadline_passes_ends_with_timeout_and_its_row_is_free(llama: Oracle) -> None:
    chooser = random.Random(4)
    with local_cluster(declared("colocated"), llama.spec) as cluster:
        with running_service(cluster.controller, request_timeout_s=1e-6) as service:
            heard = Heard()
            service.submit(request("late", chooser, max_tokens=100, ignore_eos=True), heard)
            line = heard.wait()
            counts = service.snapshot().counts
        check_nothing_is_kept(cluster)
    assert line.finish_reason == "timeout"
    assert (counts.failed, counts.finished) == (1, 0)
