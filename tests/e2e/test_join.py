"""A peer that holds KV of another shape is refused when it joins, over real UCX (field report B06)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from dejavu.engine.mailbox import Mailbox
from dejavu.ids import Epoch
from dejavu.kv.layout import KvLayout
from dejavu.transport.base import Hello, LinkRefused, Transport
from dejavu.transport.factory import make_transport

HERE = KvLayout(model_hash="a" * 32, num_layers=6, num_kv_heads=4, head_dim=16, dtype="float32", max_length=128)
SECRET = "of the test"


@pytest.fixture
def transports() -> Iterator[tuple[Transport, Transport]]:
    listening, connecting = make_transport("ucx", SECRET, {}), make_transport("ucx", SECRET, {})
    yield listening, connecting
    connecting.close()
    listening.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16"}, {"max_length": 64}, {"model_hash": "b" * 32}, {"num_kv_heads": 2}, {"num_layers": 5}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_peer_with_another_kv_layout_is_refused_with_both_values(
    transports: tuple[Transport, Transport], changes: dict[str, object]
) -> None:
    listening, connecting = transports
    there = msgspec.structs.replace(HERE, **changes)
    mailbox = Mailbox(cluster="c", epoch=lambda: Epoch(1), fingerprint=lambda: HERE.fingerprint)
    address = listening.listen(mailbox)
    hello = Hello(cluster="c", name="w0", incarnation="i", epoch=1, fingerprint=there.fingerprint)
    with pytest.raises(LinkRefused) as refused:
        connecting.connect(address, hello, peer="w1", timeout_s=10.0)
    assert HERE.fingerprint in str(refused.value)
    assert there.fingerprint in str(refused.value)
    assert "w1" in str(refused.value)
    assert address in str(refused.value)
