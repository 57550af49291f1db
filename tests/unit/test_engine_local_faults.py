"""Whatever happens to KV on its way, tokens are right or the request ends with an error; they are never wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.engine.compute import StageCompute
from dejavu.engine.messages import CONTROL
from dejavu.ids import RequestId
from dejavu.request import Completion, Request

from harness.local_cluster import Tap, local_cluster
from harness.oracle import Oracle, ragged_requests

SCHEDULINGS = ("row", "microbatch")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of("llama", tmp_path_factory.mktemp("models"))


def declared(prompt: int, token: int, *, scheduling: str = "row", timeout_s: float = 30.0) -> Declared:
    return Declared(
        mode="disaggregated",
        prompt_depth=prompt,
        token_depth=token,
        prompt_rows=2,
        token_rows=2,
        in_flight=2,
        scheduling=scheduling,  # type: ignore[arg-type]
        timeout_s=timeout_s,
    )


class KvFault:
    """A tap that treats the chosen ones of all KV messages, counted from 0, and lets the others through."""

    def __init__(self, chosen: Iterable[int]) -> None:
        self._chosen = frozenset(chosen)
        self._num_seen = 0
        self.num_treated = 0

    def __call__(self, sender: str, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        if header[:1] == CONTROL:
            return [(header, payload)]
        index, self._num_seen = self._num_seen, self._num_seen + 1
        if index not in self._chosen:
            return self.passed(peer, header, payload)
        self.num_treated += 1
        return self.treated(peer, header, payload)

    def passed(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(header, payload)]

    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        raise NotImplementedError


class Dropped(KvFault):
    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return []


class Doubled(KvFault):
    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(header, payload)] * 2


class FlippedPayload(KvFault):
    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(header, _flipped(payload, len(payload) // 3))]


class FlippedEverywhere(KvFault):
    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        # A message carries chunks of several rows; none of them stays whole.
        return [(header, bytes(byte ^ 0x10 for byte in payload))]


class FlippedHeader(KvFault):
    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        # Behind the array's and the tag's own bytes, so that a field is changed rather than the framing.
        return [(_flipped(header, len(header) - 3 - 5 * self.num_treated), payload)]


class Truncated(KvFault):
    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(header, payload[:-4])]


class DoubledThenFlipped(KvFault):
    """The good message, then a spoilt copy of it."""

    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(header, payload), (header, _flipped(payload, 1))]


class Overtaken(KvFault):
    """Held back until the next message to the same peer has left."""

    def __init__(self, chosen: Iterable[int]) -> None:
        super().__init__(chosen)
        self._held: dict[str, list[tuple[bytes, bytes]]] = {}

    def passed(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(header, payload), *self._held.pop(peer, [])]

    def treated(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        self._held.setdefault(peer, []).append((header, payload))
        return []


def _flipped(data: bytes, at: int) -> bytes:
    spoilt = bytearray(data)
    spoilt[at] ^= 0x10
    return bytes(spoilt)


def serve(oracle: Oracle, shape: Declared, requests: list[Request], tap: Tap | None) -> dict[str, Completion]:
    """The lines; every one that is no error has the right tokens, and an error says why."""
    with local_cluster(shape, oracle.spec, tap=tap) as cluster:
        completions = cluster.serve(requests)
    for request in requests:
        completion = completions[request.id]
        if completion.finish_reason == "error":
            assert completion.error
        else:
            assert completion.tokens == oracle.tokens(request)
    return completions


def num_errors(completions: dict[str, Completion]) -> int:
    return sum(completion.finish_reason == "error" for completion in completions.values())


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
@pytest.mark.parametrize(
    "fault", [FlippedPayload, Truncated, Doubled, DoubledThenFlipped], ids=lambda kind: kind.__name__
)
def test_a_few_bad_kv_messages_cost_a_second_attempt_and_no_token(
    llama: Oracle, fault: type[KvFault], scheduling: str
) -> None:
    tap = fault([1, 6])
    completions = serve(llama, declared(2, 2, scheduling=scheduling), ragged_requests(9, seed=21), tap)
    assert tap.num_treated == 2
    assert num_errors(completions) == 0


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_lost_kv_messages_are_noticed_and_computed_again(llama: Oracle, scheduling: str) -> None:
    tap = Dropped([0, 7])
    shape = declared(1, 2, scheduling=scheduling, timeout_s=1.5)
    completions = serve(llama, shape, ragged_requests(9, seed=22), tap)
    assert tap.num_treated == 2
    assert num_errors(completions) == 0


def test_overtaken_kv_messages_change_nothing(llama: Oracle) -> None:
    # The last prompts' messages pass, so that whatever was held back is released by them.
    tap = Overtaken(range(0, 20, 2))
    completions = serve(llama, declared(2, 3, timeout_s=1.5), ragged_requests(9, seed=23), tap)
    assert tap.num_treated == 10
    assert num_errors(completions) == 0


@pytest.mark.parametrize("seed", range(3))
def test_spoilt_headers_never_put_kv_in_a_wrong_place(llama: Oracle, seed: int) -> None:
    chosen = random.Random(seed).sample(range(20), 4)
    tap = FlippedHeader(chosen)
    serve(llama, declared(2, 2, timeout_s=0.3), ragged_requests(9, seed=seed), tap)
    assert tap.num_treated == 4


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_kv_that_never_arrives_whole_ends_every_request_with_the_reason(llama: Oracle, scheduling: str) -> None:
    requests = [
        Request(id=RequestId(f"r{index}"), prompt_tokens=(index + 1, 2, 3), max_tokens=4, ignore_eos=True)
        for index in range(5)
    ]
    completions = serve(llama, declared(1, 2, scheduling=scheduling), requests, FlippedEverywhere(range(10_000)))
    assert num_errors(completions) == len(requests)
    assert all("corrupt" in str(completion.error) for completion in completions.values())


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
@pytest.mark.parametrize("failing_stage", [0, 1])
def test_a_prompt_that_cannot_be_computed_costs_its_own_rows_only(
    llama: Oracle, scheduling: str, failing_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the other rows of its group under microbatch scheduling: they used to wait for ever."""
    requests = ragged_requests(9, seed=24)
    bad_length = 25
    bad = Request(id=RequestId("bad"), prompt_tokens=(9,) * bad_length, max_tokens=4)
    compute = StageCompute.prompt

    def prompt(self: StageCompute, rows: Any, inputs: Any, on_layer: Any, on_written: Any) -> Any:
        if self._place.stage.index == failing_stage and any(row.length == bad_length for row in rows):
            raise RuntimeError("out of memory, says the test")
        return compute(self, rows, inputs, on_layer, on_written)

    monkeypatch.setattr(StageCompute, "prompt", prompt)
    completions = serve(llama, declared(2, 2, scheduling=scheduling), [*requests[:4], bad, *requests[4:]], None)
    assert completions["bad"].finish_reason == "error"
    assert "out of memory, says the test" in str(completions["bad"].error)
    assert num_errors(completions) == 1


def test_a_step_that_cannot_be_computed_ends_the_run_naming_it(llama: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: StageCompute, microbatch: int, rows: Any, inputs: Any) -> Any:
        raise RuntimeError("no more steps, says the test")

    monkeypatch.setattr(StageCompute, "step", step)
    with local_cluster(declared(1, 1), llama.spec) as cluster, pytest.raises(Exception, match="no more steps"):
        cluster.serve([Request(id=RequestId("r"), prompt_tokens=(1, 2), max_tokens=4, ignore_eos=True)])
