"""What errors of gRPC mean: may it pass, or must somebody mend something?"""

from __future__ import annotations

import grpc
import pytest

from dejavu.errors import ConfigError, Retryable
from dejavu.store.faults import StoreRefused, StoreUnavailable, has_own_meaning, is_stale_token, translate
from dejavu.store.spec import StoreSpec

SPEC = StoreSpec(endpoints=("h:1",), user="ann", password="secret")


class FakeError(grpc.RpcError):
    """An error as gRPC raises it."""

    def __init__(self, code: str, details: str = "") -> None:
        self._code = grpc.StatusCode[code]
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL"])
def test_outages_are_unavailable_and_name_the_endpoint(code: str) -> None:
    error = translate(FakeError(code, "why\nnot"), "h:1", SPEC)
    assert isinstance(error, StoreUnavailable)
    assert isinstance(error, Retryable)
    assert "h:1" in str(error)
    assert f"{code}: why not" in str(error)


@pytest.mark.parametrize("code", ["PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT"])
def test_refusals_name_endpoint_user_and_reason_but_never_the_password(code: str) -> None:
    error = translate(FakeError(code, "etcdserver: permission denied"), "h:1", SPEC)
    assert isinstance(error, StoreRefused)
    assert isinstance(error, ConfigError)
    for part in ("h:1", "'ann'", "etcdserver: permission denied"):
        assert part in str(error)
    assert "secret" not in str(error)


def test_missing_user_is_refused_with_the_remedy() -> None:
    error = translate(
        FakeError("INVALID_ARGUMENT", "etcdserver: user name is empty"), "h:1", StoreSpec(endpoints=("h:1",))
    )
    assert "store.user" in str(error)


def test_full_store_is_unavailable_with_the_cure() -> None:
    error = translate(FakeError("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded"), "h:1", SPEC)
    assert isinstance(error, StoreUnavailable)
    assert "compact" in str(error)


def test_broken_first_contact_without_tls_hints_at_tls_and_later_ones_do_not() -> None:
    broken = FakeError("UNAVAILABLE", "Socket closed")
    assert "store.ca_cert" in str(translate(broken, "h:1", SPEC, first_contact=True))
    assert "store.ca_cert" not in str(translate(broken, "h:1", SPEC))


def test_unknown_lease_and_lost_history_are_left_to_the_caller() -> None:
    assert has_own_meaning(FakeError("NOT_FOUND"))
    assert has_own_meaning(FakeError("OUT_OF_RANGE"))
    assert not has_own_meaning(FakeError("UNAVAILABLE"))


def test_stale_token_is_told_from_a_wrong_password() -> None:
    assert is_stale_token(FakeError("UNAUTHENTICATED", "etcdserver: invalid auth token"))
    assert not is_stale_token(FakeError("INVALID_ARGUMENT", "etcdserver: authentication failed"))
