"""The controller against a cluster that says what the test wants; and its way of asking workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from dejavu.clock import VirtualClock
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.engine.mailbox import Event, PeerLost, Received
from dejavu.errors import DejavuError
from dejavu.ids import Epoch, RequestId, RowId
from dejavu.request import Completion, Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.controller import Controller
from dejavu.transport.base import Hello, Inbound

from harness.plans import colocated_plan, split_plan

EPOCH = Epoch(1)
MOST_S = 60.0


def received(message: m.AnyMessage, sender: str = "w0") -> Received:
    hello = Hello(cluster="c", name=sender, incarnation="i", epoch=1)
    return Received(
        message=message, inbound=Inbound(hello=hello, header=b"", payload=memoryview(b""), release=lambda: None)
    )


class Stand:
    """Peers, mailbox and observer in one; the test answers through ``script``, one event for each look."""

    def __init__(self, plan: Plan, *script: Event | None) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.script = deque(script)
        self.told: list[tuple[str, m.AnyMessage]] = []
        self.payloads: list[bytes] = []
        self.lines: dict[str, Completion] = {}
        self.failure: str | None = None
        self.suspected: list[tuple[str, Epoch, str]] = []
        self.links = ClusterLinks(plan, self, self, self.clock)  # type: ignore[arg-type]
        self.controller = Controller(self.links, None, self, self)  # type: ignore[arg-type]

    def take(self, timeout_s: float) -> Event | None:
        if timeout_s == 0.0:
            return None
        self.clock.advance(min(timeout_s, 0.25) if self.script else timeout_s)
        assert self.clock.now() < MOST_S, "the controller still waits, long after the script's end"
        return self.script.popleft() if self.script else None

    def post(self, event: Event) -> None:
        self.script.append(event)

    def tell(self, owner: str, message: m.AnyMessage, payload: Sequence[memoryview] = ()) -> Future[None]:
        self.told.append((owner, message))
        self.payloads += [bytes(part) for part in payload]
        return Future()

    def close(self, timeout_s: float) -> None:
        pass

    def token(self, request_id: str, at_s: float) -> None:
        pass

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        self.lines[completion.id] = completion

    def why_failed(self) -> str | None:
        return self.failure

    def suspect(self, worker: str, epoch: Epoch, reason: str) -> None:
        self.suspected.append((worker, epoch, reason))

    def to(self, owner: str, kind: type[m.Message]) -> list[m.AnyMessage]:
        return [message for name, message in self.told if name == owner and isinstance(message, kind)]


def request(name: str = "r", max_tokens: int = 3, arrival_s: float = 0.0) -> Request:
    return Request(id=RequestId(name), prompt_tokens=(4, 5), max_tokens=max_tokens, arrival_s=arrival_s)


def first_tokens(*tokens: int, row_ids: tuple[int, ...] = (1,)) -> Received:
    return received(m.PromptTokens(epoch=EPOCH, row_ids=tuple(RowId(row) for row in row_ids), tokens=tokens))


def next_token(token: int, row_id: int = 1) -> Received:
    return received(m.StepTokens(epoch=EPOCH, microbatch=0, step=1, row_ids=(RowId(row_id),), tokens=(token,)))


def rows_ended(row_id: int = 1) -> Received:
    return received(m.RowsEnded(epoch=EPOCH, row_ids=(RowId(row_id),)))


def rows_failed(row_id: int = 1, *, while_prompt: bool = False) -> Received:
    return received(m.RowsFailed(epoch=EPOCH, row_ids=(RowId(row_id),), reason="no KV", while_prompt=while_prompt))


def test_a_request_of_a_split_cluster_is_expected_run_admitted_and_released() -> None:
    stand = Stand(split_plan(1, 2), first_tokens(7), next_token(8), next_token(9))
    stand.controller.serve([request()])
    assert stand.lines["r"].tokens == (7, 8, 9)
    (run,) = stand.to("w0", m.RunPrompt)
    assert isinstance(run, m.RunPrompt)
    assert run.rows[0].length == 2
    (admit,) = stand.to("w1", m.AdmitRows)
    assert isinstance(admit, m.AdmitRows)
    assert (admit.rows[0].position, admit.rows[0].token, admit.rows[0].num_generated) == (2, 7, 1)
    for worker in ("w1", "w2"):
        kinds = [type(message) for name, message in stand.told if name == worker]
        assert kinds[0] is m.ExpectRows
        assert kinds[-1] is m.ReleaseRows


def test_a_colocated_cluster_is_told_of_rows_at_stage_0_only() -> None:
    stand = Stand(colocated_plan(2), first_tokens(7))
    stand.controller.serve([request(max_tokens=1)])
    assert {name for name, _ in stand.told} == {"w0"}
    assert [type(message) for _, message in stand.told] == [m.RunPrompt, m.ReleaseRows]


def test_requests_are_submitted_when_they_arrive() -> None:
    stand = Stand(split_plan(), first_tokens(7), None, None, None, first_tokens(7, row_ids=(2,)))
    stand.controller.serve([request("late", 1, arrival_s=1.0), request("early", 1)])
    assert stand.lines["early"].end_s < 1.0 <= stand.lines["late"].end_s


def test_a_row_that_fails_is_tried_twice_more_and_then_ends_with_the_reason() -> None:
    stand = Stand(
        split_plan(),
        rows_failed(1, while_prompt=True),
        rows_ended(1),
        rows_failed(2, while_prompt=True),
        rows_ended(2),
        rows_failed(3, while_prompt=True),
    )
    stand.controller.serve([request()])
    assert (stand.lines["r"].finish_reason, stand.lines["r"].error) == ("error", "no KV")
    assert len(stand.to("w0", m.RunPrompt)) == 3


def test_the_second_attempt_goes_on_from_the_tokens_that_are_known() -> None:
    """Their user has them already, and they used to be made once more."""
    stand = Stand(
        split_plan(), first_tokens(7), rows_failed(1), rows_ended(1), first_tokens(8, row_ids=(2,)),
        next_token(99, 1), next_token(9, 2),
    )  # fmt: skip
    stand.controller.serve([request()])
    assert stand.lines["r"].tokens == (7, 8, 9)
    first, second = (message.rows[0] for message in stand.to("w0", m.RunPrompt) if isinstance(message, m.RunPrompt))
    assert (first.length, second.length) == (2, 3)
    assert stand.payloads[-1] == bytes(memoryview(np.array([4, 5, 7], dtype=np.int32)))
    admits = [message for message in stand.to("w1", m.AdmitRows) if isinstance(message, m.AdmitRows)]
    assert [(row.position, row.token, row.num_generated) for admit in admits for row in admit.rows] == [
        (2, 7, 1),
        (3, 8, 2),
    ]


def test_a_late_complaint_about_a_row_that_has_ended_is_passed_over() -> None:
    """Its place was given back before its last tokens came, and the controller fell over the missing row."""
    stand = Stand(split_plan(), first_tokens(7), next_token(8), rows_ended(), rows_failed(), next_token(9))
    stand.controller.serve([request()])
    assert (stand.lines["r"].tokens, stand.lines["r"].finish_reason) == ((7, 8, 9), "length")


def test_a_row_that_fails_before_its_first_token_comes_does_not_break_its_group() -> None:
    """Microbatch scheduling looked for the place of a row that had been given back already."""
    stand = Stand(
        split_plan(1, 1, in_flight=1, scheduling="microbatch"),
        rows_failed(1),
        rows_ended(1),
        first_tokens(7, 7, row_ids=(1, 2)),
        rows_ended(2),
        first_tokens(7, row_ids=(3,)),
    )
    stand.controller.serve([request("a", 1), request("b", 1)])
    assert {line.finish_reason for line in stand.lines.values()} == {"length"}


def test_a_group_is_admitted_when_the_last_prompt_it_waited_for_has_failed() -> None:
    """The rows of the group that had their first tokens were never admitted."""
    stand = Stand(
        split_plan(1, 1, prompt_rows=1, in_flight=1, scheduling="microbatch"),
        first_tokens(7),
        rows_failed(2, while_prompt=True),
        next_token(8),
        rows_ended(1),
        rows_ended(2),
        rows_failed(3, while_prompt=True),
        rows_ended(3),
        rows_failed(4, while_prompt=True),
    )
    stand.controller.serve([request("a", 2), request("b", 2)])
    assert stand.lines["a"].tokens == (7, 8)
    assert stand.lines["b"].finish_reason == "error"


def test_a_failure_of_the_cluster_ends_the_run_with_its_reason() -> None:
    stand = Stand(split_plan())
    stand.failure = "worker w1 died"
    with pytest.raises(DejavuError, match="worker w1 died"):
        stand.controller.serve([request()])


def test_a_lost_link_is_a_suspicion_and_not_the_end_whoever_has_lost_it() -> None:
    link_lost = received(m.LinkLost(epoch=EPOCH, peer="w2", reason="deadline"))
    stand = Stand(split_plan(1, 2), PeerLost(peer="w1", reason="reset", epoch=EPOCH), link_lost, first_tokens(7))
    stand.controller.serve([request(max_tokens=1)])
    assert stand.suspected == [("w1", EPOCH, "reset"), ("w2", EPOCH, "deadline")]
    assert stand.lines["r"].tokens == (7,)


def test_a_message_that_is_not_for_the_controller_is_dropped() -> None:
    stand = Stand(split_plan(), received(m.Stop(epoch=EPOCH)), first_tokens(7))
    stand.controller.serve([request(max_tokens=1)])
    assert stand.lines["r"].tokens == (7,)


def test_asking_collects_an_answer_from_each_and_leaves_the_rest_for_later() -> None:
    answers = [received(m.InspectedRow(epoch=EPOCH, stage=stage), f"w{stage + 1}") for stage in (1, 0)]
    other = rows_ended()
    stand = Stand(split_plan(), answers[0], other, answers[1])
    ask = m.InspectRow(epoch=EPOCH, microbatch=0, row_index=0, length=1)
    found = stand.links.ask(ask, ["w1", "w2"], m.InspectedRow, timeout_s=5.0)
    assert {name: answer.message for name, answer in found.items()} == {
        "w1": m.InspectedRow(epoch=EPOCH, stage=0),
        "w2": m.InspectedRow(epoch=EPOCH, stage=1),
    }
    assert list(stand.script) == [other]


def test_asking_a_worker_that_is_gone_or_silent_says_which() -> None:
    ask = m.AskReport(epoch=EPOCH)
    with pytest.raises(DejavuError, match="w1 is gone"):
        Stand(split_plan(), PeerLost(peer="w1", reason="reset", epoch=EPOCH)).links.ask(
            ask, ["w1"], m.Report, timeout_s=5.0
        )
    with pytest.raises(DejavuError, match=r"no answer from w1 in 5 s"):
        Stand(split_plan()).links.ask(ask, ["w1"], m.Report, timeout_s=5.0)


def test_stopping_tells_every_worker() -> None:
    stand = Stand(split_plan(1, 2))
    stand.links.stop_workers()
    assert [name for name, message in stand.told if isinstance(message, m.Stop)] == ["w0", "w1", "w2"]
