"""KV that arrives after its row has ended, while another row holds the place (field report B07).

A tap holds the KV of row A back until A has ended or failed and been released, and lets it go at a chosen moment of
row B's life in the one place that there is. Nothing waits for a clock: whatever is needed for a moment has come.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.engine import messages as m
from dejavu.ids import RequestId, RowId
from dejavu.kv.chunk import KvMessage, decode_message
from dejavu.kv.inbox import KvInbox
from dejavu.kv.staging import StagingRing
from dejavu.request import Request

from harness.local_cluster import local_cluster
from harness.oracle import Oracle, random_prompt

pytestmark = pytest.mark.slow
NUM_ROUNDS = 50
NUM_LAYERS = 3
A_LENGTH, B_LENGTHS = 40, (1, 39)
"""A's prompt is longer than any of B's, so A's row is known by its length, and its cells reach beyond B's."""

Sent: TypeAlias = tuple[bytes, bytes]
Moment: TypeAlias = Literal["before B's KV", "amid B's KV", "behind B's KV", "as B is admitted", "amid B's steps"]
Built = TypeVar("Built", KvInbox, StagingRing)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of("llama", tmp_path_factory.mktemp("models"), num_layers=NUM_LAYERS)


def built(kind: type[Built], monkeypatch: pytest.MonkeyPatch) -> list[Built]:
    """Every object of the class that is made from now on."""
    made: list[Built] = []
    begin = kind.__init__

    def recorded(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(kind, "__init__", recorded)
    return made


@dataclass(slots=True)
class LateKv:
    """A tap that holds A's KV and delivers it at ``moments``, one for each round, in B's time.

    ``spoils`` lets layer 0 of each of A's attempts through, however often it is sent, but corrupt, so that A fails.
    ``spoils_late`` makes what is delivered in B's time corrupt.
    """

    moments: Sequence[Moment]
    spoils: bool = False
    spoils_late: bool = False
    num_delivered: int = 0
    """Chunks of A that were sent on after their row had been released."""
    spoilt_rows: set[RowId] = field(default_factory=set)
    num_come: int = 0
    """Moments that have come, counted for each token stage."""
    _round: int = -1
    _come: set[str] = field(default_factory=set)
    """Token stages at which this round's moment has come: A's KV is held for them no longer."""
    _held: dict[str, list[Sent]] = field(default_factory=dict)
    _is_bs_time: bool = True
    _a_rows: set[RowId] = field(default_factory=set)
    _num_b_layers: dict[RowId, int] = field(default_factory=dict)

    def __call__(self, sender: str, peer: str, header: bytes, payload: bytes) -> list[Sent]:
        if header[:1] != m.CONTROL:
            return self._kv(peer, header, payload)
        message = m.decode(header)
        own = (header, payload)
        if isinstance(message, m.ExpectRows):
            self._expect(message.rows[0])
        if isinstance(message, m.AdmitRows) and not self._is_a(message):
            return [own, *self._due(peer, "as B is admitted")]
        if isinstance(message, m.StepActivations | m.StepTokens) and peer != "controller":
            return [*self._due(peer, "amid B's steps"), own]
        return [own]

    @property
    def num_held(self) -> int:
        return sum(len(messages) for messages in self._held.values())

    def _is_a(self, message: m.AdmitRows) -> bool:
        return message.rows[0].row_id in self._a_rows

    def _expect(self, row: m.PromptRow) -> None:
        """A's first attempt begins a round."""
        is_a = row.length >= A_LENGTH  # a further attempt has A's known tokens behind its prompt
        if is_a and self._is_bs_time:
            self._round += 1
            self._come.clear()
        if is_a:
            self._a_rows.add(row.row_id)
        self._is_bs_time = not is_a

    def _kv(self, peer: str, header: bytes, payload: bytes) -> list[Sent]:
        message, own = decode_message(header), (header, payload)
        row_id = message.chunks[0].row_id
        if row_id in self._a_rows:
            return self._of_a(peer, message, own)
        layer = self._num_b_layers[row_id] = self._num_b_layers.get(row_id, 0) + 1
        if layer == 1:
            return [*self._due(peer, "before B's KV"), own]
        if layer == 2:
            return [*self._due(peer, "amid B's KV"), own]
        return [own, *self._due(peer, "behind B's KV")]

    def _of_a(self, peer: str, message: KvMessage, own: Sent) -> list[Sent]:
        if self.spoils and 0 in message.chunks[0].layers:
            self.spoilt_rows.add(message.chunks[0].row_id)
            return [spoilt(own)]
        if peer in self._come:
            # The streamer is a thread of its own: B can be admitted while A's last layers still leave.
            return self._delivered([own])
        self._held.setdefault(peer, []).append(own)
        return []

    def _due(self, peer: str, moment: Moment) -> list[Sent]:
        """What is held for the peer, if this is the round's moment."""
        if peer in self._come or self.moments[self._round] != moment:
            return []
        self._come.add(peer)
        self.num_come += 1
        return self._delivered(self._held.pop(peer, []))

    def _delivered(self, messages: list[Sent]) -> list[Sent]:
        self.num_delivered += sum(len(decode_message(header).chunks) for header, _ in messages)
        return [spoilt(message) for message in messages] if self.spoils_late else messages


def spoilt(message: Sent) -> Sent:
    """The same header over other bytes."""
    return message[0], bytes(byte ^ 0x10 for byte in message[1])


def declared(token_depth: int) -> Declared:
    """One place for a row in the whole token pipeline."""
    return Declared(
        mode="disaggregated",
        prompt_depth=1,
        token_depth=token_depth,
        prompt_rows=1,
        token_rows=1,
        in_flight=1,
        scheduling="row",
        timeout_s=30.0,
    )


def rounds(seed: int, *, a_tokens: int) -> Iterator[Request]:
    """A, B, A, B, ... and a last B whose KV is behind everything that was delivered late."""
    chooser = random.Random(seed)
    for index in range(NUM_ROUNDS):
        yield request(f"a{index}", random_prompt(chooser, A_LENGTH), a_tokens)
        yield request(f"b{index}", random_prompt(chooser, chooser.randint(*B_LENGTHS)), chooser.randint(3, 6))
    yield request("last", random_prompt(chooser, 5), 3)


def request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(id=RequestId(name), prompt_tokens=prompt, max_tokens=max_tokens, ignore_eos=True)


def chosen_moments(seed: int, among: Sequence[Moment]) -> list[Moment]:
    """Each moment about equally often, in a random order."""
    moments = [among[index % len(among)] for index in range(NUM_ROUNDS)]
    random.Random(seed).shuffle(moments)
    return moments


@pytest.fixture
def inboxes(monkeypatch: pytest.MonkeyPatch) -> list[KvInbox]:
    return built(KvInbox, monkeypatch)


@pytest.fixture
def stagings(monkeypatch: pytest.MonkeyPatch) -> list[StagingRing]:
    return built(StagingRing, monkeypatch)


AT_ONE_STAGE: tuple[Moment, ...] = ("before B's KV", "amid B's KV", "behind B's KV", "as B is admitted")


@pytest.mark.parametrize(
    ("token_depth", "among"), [(1, AT_ONE_STAGE), (2, ("amid B's steps",))], ids=["1+1", "1+2-amid-steps"]
)
def test_kv_of_a_row_that_ended_arrives_in_the_next_rows_time_and_changes_nothing(
    llama: Oracle, token_depth: int, among: Sequence[Moment], inboxes: list[KvInbox], stagings: list[StagingRing]
) -> None:
    """A ends with its first token, so it is released before any of its KV has come."""
    tap = LateKv(chosen_moments(7, among))
    requests = list(rounds(7, a_tokens=1))
    with local_cluster(declared(token_depth), llama.spec, tap=tap) as cluster:
        completions = cluster.serve(requests)
        counters = cluster.counters()
        assert [inbox.num_rows for inbox in inboxes] == [0] * token_depth
        assert [staging.num_out for staging in stagings] == [0]
    assert {name: line.tokens for name, line in completions.items()} == llama.all_tokens(requests)
    assert (tap.num_come, tap.num_held) == (NUM_ROUNDS * token_depth, 0)
    assert tap.num_delivered == NUM_ROUNDS * NUM_LAYERS
    assert sum(worker.kv.get("stale", 0) for worker in counters.values()) == tap.num_delivered
    assert sum(worker.kv.get("accepted", 0) for worker in counters.values()) == (NUM_ROUNDS + 1) * NUM_LAYERS


def test_kv_of_a_row_that_failed_arrives_in_the_next_rows_time_and_changes_nothing(
    llama: Oracle, inboxes: list[KvInbox], stagings: list[StagingRing]
) -> None:
    """A fails at each attempt by a corrupt chunk; the rest of all its attempts arrives when B has the place."""
    tap = LateKv(chosen_moments(8, AT_ONE_STAGE), spoils=True)
    requests = list(rounds(8, a_tokens=4))
    with local_cluster(declared(1), llama.spec, tap=tap) as cluster:
        completions = cluster.serve(requests)
        stale = sum(worker.kv.get("stale", 0) for worker in cluster.counters().values())
        assert [inbox.num_rows for inbox in inboxes] == [0]
        assert [staging.num_out for staging in stagings] == [0]
    for asked in requests:
        line = completions[asked.id]
        if asked.id.startswith("a"):
            assert line.finish_reason == "error"
            assert "corrupt KV" in str(line.error)
        else:
            assert line.tokens == llama.tokens(asked)
    assert (tap.num_come, tap.num_held) == (NUM_ROUNDS, 0)
    assert tap.num_delivered == len(tap.spoilt_rows) * (NUM_LAYERS - 1)
    assert stale == tap.num_delivered


def test_corrupt_kv_of_a_row_that_ended_is_neither_landed_nor_asked_for_again(
    llama: Oracle, inboxes: list[KvInbox], stagings: list[StagingRing]
) -> None:
    tap = LateKv(chosen_moments(9, AT_ONE_STAGE), spoils_late=True)
    requests = list(rounds(9, a_tokens=1))
    with local_cluster(declared(1), llama.spec, tap=tap) as cluster:
        completions = cluster.serve(requests)
        counters = cluster.counters().values()
        assert [inbox.num_rows for inbox in inboxes] == [0]
        assert [staging.num_out for staging in stagings] == [0]
    assert {name: line.tokens for name, line in completions.items()} == llama.all_tokens(requests)
    assert tap.num_delivered == NUM_ROUNDS * NUM_LAYERS
    assert sum(worker.kv.get("corrupt", 0) for worker in counters) == tap.num_delivered
    assert sum(worker.kv.get("asked_again", 0) for worker in counters) == 0
