"""How two peers prove the cluster's secret to each other without sending it, and agree on credits."""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from dejavu.transport.base import Hello
from dejavu.transport.credits import CreditLimit
from dejavu.transport.frames import PROTOCOL_VERSION, Accept, Challenge, Greeting

NONCE_BYTES = 32


class HandshakeError(Exception):
    """The other side is not one of ours."""


class ConnectorHandshake:
    """The connecting side's part."""

    def __init__(self, secret: str, hello: Hello) -> None:
        self._secret = secret
        self._hello = msgspec.msgpack.encode(hello)
        self._nonce = new_nonce()

    def answer(self, challenge: Challenge) -> Greeting:
        """Our Hello and its proof. Raises HandshakeError for a listener of another version."""
        if challenge.version != PROTOCOL_VERSION:
            theirs = challenge.version
            raise HandshakeError(f"the listener speaks protocol version {theirs}, this side {PROTOCOL_VERSION}")
        proof = greeting_proof(self._secret, nonce=challenge.nonce, hello=self._hello)
        return Greeting(self._hello, proof, self._nonce)

    def credits(self, accept: Accept) -> CreditLimit:
        """What the listener grants. Raises HandshakeError when it has not proven the secret in turn."""
        if not proves(accept_proof(self._secret, nonce=self._nonce, hello=self._hello), accept.proof):
            raise HandshakeError("the listener does not know the cluster's secret")
        return CreditLimit(messages=accept.credit_messages, num_bytes=accept.credit_bytes)


def new_nonce() -> bytes:
    """Bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def greeting_proof(secret: str, *, nonce: bytes, hello: bytes) -> bytes:
    """What only a holder of the secret can say about this Hello to this listener's nonce."""
    return _mac(secret, b"connect", nonce, hello)


def accept_proof(secret: str, *, nonce: bytes, hello: bytes) -> bytes:
    """What only a listener that holds the secret can answer; the label keeps a proof from being echoed back."""
    return _mac(secret, b"accept", nonce, hello)


def proves(expected: bytes, given: bytes) -> bool:
    """True for equal proofs; takes the same time for all others."""
    return hmac.compare_digest(expected, given)


def _mac(secret: str, label: bytes, nonce: bytes, hello: bytes) -> bytes:
    parts = (label, nonce, hello)
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.new(secret.encode(), message, hashlib.sha256).digest()
