"""What comes to a listener's port from those who are not of the cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dejavu.transport.base import TransportError
from dejavu.transport.core import CoreError
from dejavu.transport.credits import CreditLimit
from dejavu.transport.engine import LinkTransport
from dejavu.transport.frames import FRAME_TAG, Head, encode
from dejavu.transport.local import LocalNetwork, LocalTransport

from harness.transport_kit import WAIT_S, Bench, Inbox, hello

KINDS = ["local", pytest.param("ucx", marks=pytest.mark.slow)]
HANDSHAKE_TIMEOUT_S = 0.3


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    network = LocalNetwork()

    def make(secret: str, credits: CreditLimit, handshake_timeout_s: float) -> LinkTransport:
        if request.param == "local":
            return LocalTransport(network, secret, credit_limit=credits, handshake_timeout_s=handshake_timeout_s)
        from dejavu.transport.ucx import UcxTransport

        return UcxTransport(secret, credit_limit=credits, handshake_timeout_s=handshake_timeout_s)

    made = Bench(make, counts_descriptors=request.param == "local")
    yield made
    made.finish()


def intrude(stranger: LinkTransport, address: str, rubbish: bytes | None) -> threading.Event:
    """Opens a raw connection and sends the bytes as a frame; the event tells that the listener has hung up."""
    hung_up = threading.Event()
    core = stranger._core
    endpoint = core.endpoint("127.0.0.1", int(address.rpartition(":")[2]))

    def opened(failure: CoreError | None) -> None:
        assert failure is None
        if rubbish is not None:
            endpoint.send(FRAME_TAG, memoryview(rubbish), lambda failure: None)

    def closed(reason: str) -> None:
        endpoint.abort()
        hung_up.set()

    core.call(lambda: endpoint.open(opened, closed), WAIT_S)
    return hung_up


@pytest.mark.parametrize(
    "rubbish",
    [None, b"GET / HTTP/1.1\r\n\r\n", bytes(encode(Head(b"let me in", b"", (1 << 40,), 1)))],
    ids=["silence", "http", "head"],
)
def test_connection_without_a_greeting_is_hung_up_and_others_are_served(bench: Bench, rubbish: bytes | None) -> None:
    inbox = Inbox()
    address = bench.transport(handshake_timeout_s=HANDSHAKE_TIMEOUT_S).listen(inbox)
    hung_up = intrude(bench.transport(), address, rubbish)
    link = bench.transport().connect(address, hello(), peer="w1")
    assert hung_up.wait(WAIT_S)
    link.send(b"fine").result(WAIT_S)
    assert inbox.take().header == b"fine"
    assert inbox.losses.empty()


def test_listener_that_never_answers_is_an_error_within_the_deadline(bench: Bench) -> None:
    silent = bench.transport()
    port = silent._core.call(lambda: silent._core.listen(0, lambda endpoint: None), WAIT_S)
    with pytest.raises(TransportError, match="no answer") as caught:
        bench.transport().connect(f"127.0.0.1:{port}", hello(), peer="w1", timeout_s=0.5)
    assert caught.value.address == f"127.0.0.1:{port}"
    assert caught.value.phase in ("connect", "handshake")
