"""What etcd's and gRPC's errors mean for a caller: may it pass, or must somebody mend something?"""

from __future__ import annotations

import grpc

from dejavu.errors import ConfigError, Retryable
from dejavu.store.spec import StoreSpec

_REFUSALS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNIMPLEMENTED")
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")


class StoreUnavailable(Retryable):
    """etcd was not reached or did not answer in time; whether a write took effect is unknown."""


class StoreRefused(ConfigError):
    """etcd (or TLS before it) turned this client away; trying again does not help before somebody mends it."""


def detail_of(error: grpc.RpcError) -> str:
    """The status and the server's or gRPC's own words, on one line."""
    words = " ".join(str(error.details() or "").split())
    return f"{error.code().name}: {words}" if words else str(error.code().name)


def is_stale_token(error: grpc.RpcError) -> bool:
    """True when logging in again will help (etcd restarted, token expired, users were changed)."""
    return any(sign in str(error.details()) for sign in _STALE_TOKEN)


def is_lease_gone(error: grpc.RpcError) -> bool:
    """True when the call named a lease that etcd does not hold (any more)."""
    return bool(error.code() == grpc.StatusCode.NOT_FOUND)


def is_history_gone(error: grpc.RpcError) -> bool:
    """True when the call named a revision that etcd has compacted, or never reached."""
    return bool(error.code() == grpc.StatusCode.OUT_OF_RANGE)


def has_own_meaning(error: grpc.RpcError) -> bool:
    """True for answers that are neither an outage nor a refusal, so that only the caller can tell what they mean."""
    return is_lease_gone(error) or is_history_gone(error)


def translate(
    error: grpc.RpcError, endpoint: str, spec: StoreSpec, *, first_contact: bool = False
) -> StoreUnavailable | StoreRefused:
    """The error to raise instead of ``error``; its message names the endpoint, the reason and a remedy.

    ``first_contact`` says that nothing came from there before, so that a mismatch of TLS may be the reason.
    """
    detail = detail_of(error)
    code = error.code().name
    if code in _REFUSALS:
        return StoreRefused(f"etcd at {endpoint} refused {_who(spec)}: {detail}{_refusal_hint(detail, spec)}")
    if code == "UNAVAILABLE" and (wrong := _wrong_tls(detail, spec)):
        return StoreRefused(f"etcd at {endpoint}: {wrong}: {detail}")
    if code == "RESOURCE_EXHAUSTED" and "space exceeded" in detail:
        return StoreUnavailable(f"etcd at {endpoint} is full: {detail}; compact, defragment and disarm its alarms")
    hint = _tls_hint(error, spec) if first_contact else ""
    return StoreUnavailable(f"etcd at {endpoint} is not available: {detail}{hint}")


def unreadable(error: OSError, spec: StoreSpec) -> StoreRefused:
    """The error for a TLS file that cannot be read."""
    return StoreRefused(f"store TLS file {error.filename}: {error.strerror} (ca_cert={spec.ca_cert}, cert={spec.cert})")


def _who(spec: StoreSpec) -> str:
    if spec.user is not None:
        return f"user {spec.user!r}"
    return f"the holder of {spec.cert}" if spec.cert is not None else "a client without user"


def _refusal_hint(detail: str, spec: StoreSpec) -> str:
    if "user name is empty" in detail:
        return "; it asks for store.user and store.password"
    if "authentication is not enabled" in detail:
        return "; it knows no users: leave out store.user and store.password"
    return ""


def _wrong_tls(detail: str, spec: StoreSpec) -> str:
    """What is wrong with the certificates where gRPC's words leave no doubt, else nothing."""
    if "CERTIFICATE_VERIFY_FAILED" in detail:
        return (
            f"store.ca_cert={spec.ca_cert} does not vouch for its certificate (wrong authority, wrong host or expired)"
        )
    if "security handshaker" in detail:
        return f"no certificates can be read from store.ca_cert={spec.ca_cert} (or store.cert, store.key)"
    if "_ALERT_" in detail:
        given = f"store.cert={spec.cert}" if spec.cert is not None else "a client without store.cert"
        return f"its TLS turned away {given}"
    return ""


def _tls_hint(error: grpc.RpcError, spec: StoreSpec) -> str:
    """A word on TLS where a connection was made and broke: that is all that such a mismatch shows to a client."""
    words = str(error.details()).lower()
    if error.code() != grpc.StatusCode.UNAVAILABLE or not any(sign in words for sign in ("closed", "reset", "eof")):
        return ""
    if spec.ca_cert is None:
        return " (if it listens with TLS, give store.ca_cert)"
    return " (TLS: it may want another client certificate, or not speak TLS at all)"
