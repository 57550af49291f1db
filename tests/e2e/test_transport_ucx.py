"""What is true of the UCX transport alone."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from dejavu.errors import Fatal
from dejavu.transport.base import TransportError
from dejavu.transport.ucx import UcxTransport

from harness.transport_kit import SECRET, WAIT_S, Inbox, hello, num_descriptors

pytestmark = pytest.mark.slow


@pytest.fixture
def pair() -> Iterator[tuple[UcxTransport, UcxTransport]]:
    listening, connecting = UcxTransport(SECRET), UcxTransport(SECRET)
    with contextlib.closing(listening), contextlib.closing(connecting):
        yield listening, connecting


def test_description_and_log_name_the_interface_that_was_chosen(
    pair: tuple[UcxTransport, UcxTransport], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dejavu.transport")
    listening, connecting = pair
    link = connecting.connect(listening.listen(Inbox()), hello(), peer="w1")
    assert link.description.startswith("ucx ")
    assert "/" in link.description
    assert f"link to w1 at {link.address} is up: {link.description}" in caplog.text


def test_transport_that_is_closed_gives_back_every_descriptor() -> None:
    UcxTransport(SECRET).close()  # The first use opens what stays with the process.
    before = num_descriptors()
    for _ in range(3):
        inbox, listening, connecting = Inbox(), UcxTransport(SECRET), UcxTransport(SECRET)
        connecting.connect(listening.listen(inbox), hello(), peer="w1").send(b"x").result(WAIT_S)
        inbox.take().release()
        connecting.close()
        listening.close()
    gc.collect()
    assert num_descriptors() == before


def test_aborted_links_do_not_add_up_in_descriptors(pair: tuple[UcxTransport, UcxTransport]) -> None:
    listening, connecting = pair
    inbox = Inbox()
    address = listening.listen(inbox)
    payload = memoryview(bytes(4 << 20))
    counts = []
    for _ in range(10):
        link = connecting.connect(address, hello(), peer="w1")
        for _ in range(4):
            link.send(b"", [payload])
        inbox.take().release()
        link.abort()
        inbox.losses.get(timeout=WAIT_S)
        counts.append(num_descriptors())
    # A link takes about six on both sides together, and some are freed a little later: ten leaked ones would show.
    assert counts[-1] <= counts[0] + 12


def test_link_that_would_use_up_the_descriptors_is_refused_and_later_ones_are_served(
    pair: tuple[UcxTransport, UcxTransport],
) -> None:
    listening, connecting = pair
    inbox = Inbox()
    address = listening.listen(inbox)
    link = connecting.connect(address, hello(), peer="w1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors() + 20, hard))
    try:
        with pytest.raises(TransportError, match="ulimit"):
            connecting.connect(address, hello(), peer="w1", timeout_s=0.2)
        link.send(b"unharmed").result(WAIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connecting.connect(address, hello(), peer="w1").send(b"served").result(WAIT_S)
    assert [inbox.take().header, inbox.take().header] == [b"unharmed", b"served"]


@pytest.mark.parametrize("rubbish", [b"", b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n"])
def test_plain_tcp_connection_to_the_listeners_port_does_no_harm(
    pair: tuple[UcxTransport, UcxTransport], rubbish: bytes
) -> None:
    listening, connecting = pair
    inbox = Inbox()
    address = listening.listen(inbox)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as stranger:
        stranger.sendall(rubbish)
        connecting.connect(address, hello(), peer="w1").send(b"fine").result(WAIT_S)
    assert inbox.take().header == b"fine"


def test_plain_tcp_listener_that_never_answers_is_an_error_within_the_deadline(
    pair: tuple[UcxTransport, UcxTransport],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TransportError) as caught:
            pair[1].connect(address, hello(), peer="w1", timeout_s=0.5)
    assert (caught.value.peer, caught.value.address, caught.value.phase) == ("w1", address, "connect")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transport_in_a_forked_child_refuses_every_use(pair: tuple[UcxTransport, UcxTransport]) -> None:
    listening, connecting = pair
    link = connecting.connect(listening.listen(Inbox()), hello(), peer="w1")
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: link.send(b""),
            link.abort,
            link.close,
            connecting.close,
            lambda: connecting.connect(link.address, hello(), peer="w1"),
            lambda: connecting.listen(Inbox()),
        ):
            try:
                use()
            except Fatal:
                refused += 1
        os._exit(0 if refused == 6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    link.send(b"the parent goes on").result(WAIT_S)
