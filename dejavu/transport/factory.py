"""From the name of a transport in the configuration to the transport."""

from __future__ import annotations

from collections.abc import Mapping

from dejavu.errors import ConfigError, nearest
from dejavu.transport.base import Transport
from dejavu.transport.credits import CreditLimit
from dejavu.transport.engine import DEFAULT_CREDITS
from dejavu.transport.local import LocalNetwork, LocalTransport
from dejavu.transport.ucx import UcxTransport

KINDS = ("local", "ucx")


def make_transport(
    kind: str,
    secret: str,
    settings: Mapping[str, str],
    *,
    network: LocalNetwork | None = None,
    credit_limit: CreditLimit = DEFAULT_CREDITS,
    handshake_timeout_s: float = 5.0,
) -> Transport:
    """A running transport. ``settings`` are UCX environment variables; ``network`` is what ``local`` ones share.

    Raises ConfigError for an unknown kind, for ``ucx`` without a binding, and for ``local`` without a network.
    """
    if kind == "ucx":
        return UcxTransport(secret, settings, credit_limit=credit_limit, handshake_timeout_s=handshake_timeout_s)
    if kind == "local":
        if network is None:
            raise ConfigError("transport=local works inside one process only; workers in processes need transport=ucx")
        return LocalTransport(network, secret, credit_limit=credit_limit, handshake_timeout_s=handshake_timeout_s)
    raise ConfigError(f"transport={kind}: no such transport; {nearest(kind, KINDS)}")
