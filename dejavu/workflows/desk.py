"""The controller's place in the cluster: a claim on its name, a listener, a secret, a way to the store."""

from __future__ import annotations

import os
import platform
import secrets
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dejavu.clock import SystemClock
from dejavu.config import Config
from dejavu.control.plan import Plan
from dejavu.engine.cluster_view import ControllerEntry
from dejavu.engine.mailbox import Mailbox
from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper
from dejavu.store.spec import StoreSpec
from dejavu.transport.base import Transport
from dejavu.transport.factory import make_transport
from dejavu.transport.interface import address_of
from operators.board import StoreBoard

CLOSE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """The controller's place: where it listens, what it proves itself with, and its claim on the cluster's name."""

    plans: list[Plan]
    """The last one is in force: messages of another epoch are not taken. The operator's thread appends."""
    clock: SystemClock
    secret: str
    mailbox: Mailbox
    transport: Transport
    entry: ControllerEntry
    board: StoreBoard


@contextmanager
def open_desk(config: Config, plan: Plan, store: StoreSpec) -> Iterator[Desk]:
    """This process is the cluster's only controller and listens."""
    clock, secret = SystemClock(), config.cluster.secret or secrets.token_hex(16)
    with ExitStack() as stack:
        client = StoreClient(store)
        stack.callback(client.close)
        keeper = LeaseKeeper(store, config.cluster.lease_ttl_s, {})
        stack.callback(keeper.close)
        in_force = [plan]
        mailbox = Mailbox(cluster=config.cluster.name, epoch=lambda: in_force[-1].epoch, fingerprint=lambda: "")
        transport = make_transport(config.transport.kind.value, secret, config.transport.settings)
        stack.callback(transport.close, CLOSE_TIMEOUT_S)
        entry = ControllerEntry(
            incarnation=uuid.uuid4().hex[:12],
            host=platform.node(),
            pid=os.getpid(),
            address=transport.listen(mailbox, host=address_of(config.cluster.host)),
        )
        board = StoreBoard(client, keeper, Keys(config.cluster.name))
        board.claim(entry, clock, lease_ttl_s=config.cluster.lease_ttl_s)
        yield Desk(
            plans=in_force,
            clock=clock,
            secret=secret,
            mailbox=mailbox,
            transport=transport,
            entry=entry,
            board=board,
        )
