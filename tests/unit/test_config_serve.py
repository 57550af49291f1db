"""A service that cannot be is refused before anything starts."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from dejavu.api.server import Address, check_tls
from dejavu.config import check_paths
from dejavu.errors import ConfigError

from harness.cluster_kit import configured


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_paths(configured(*overrides))
    message = str(refused.value)
    assert len(message.splitlines()) <= 3
    return message


def test_a_service_listens_on_this_machine_alone_and_needs_no_key_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DEJAVU_API_KEY", raising=False)
    serve = configured("workflow=serve").serve
    assert (serve.host, serve.port, serve.api_key, serve.tls_cert) == ("127.0.0.1", 8000, None, None)


def test_the_key_may_stand_in_the_environment_whatever_the_workflow_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAVU_API_KEY", "secret")
    config = configured("workflow=serve")
    assert config.serve.api_key == "secret"
    assert "secret" not in repr(config)
    configured()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("serve.port=65536", "serve.port=65536: must be from 0 to 65535"),
        ("serve.host='http://x'", "must be an address or host name"),
        ("serve.api_key='two words'", "serve.api_key must be visible ASCII"),
        ("serve.api_key=''", "serve.api_key must be visible ASCII"),
        ("serve.max_queue=-1", "serve.max_queue=-1: must be at least 0"),
        ("serve.request_timeout_s=0", "serve.request_timeout_s=0"),
        ("serve.drain_timeout_s=-1", "serve.drain_timeout_s=-1"),
        ("serve.tls_cert=cert.pem", "serve.tls_cert and serve.tls_key go together"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_limit(override: str, words: str) -> None:
    assert words in refusal("workflow=serve", override)


def test_tls_files_must_be_there() -> None:
    words = refusal("workflow=serve", "serve.tls_cert=/nowhere/cert.pem", "serve.tls_key=/nowhere/key.pem")
    assert words.startswith("serve.tls_cert=/nowhere/cert.pem: no such file")


def test_what_is_for_a_service_is_refused_elsewhere() -> None:
    assert "serve is for workflow=serve, and the choice is workflow=generate" in refusal("serve.port=81")


def test_a_port_that_is_taken_is_refused_by_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serve\.host=127\.0\.0\.1 serve\.port={port}: cannot listen there"):
            Address("127.0.0.1", port)


def test_a_port_is_one_service_s_from_the_first_moment_on() -> None:
    with Address("127.0.0.1", 0) as first:
        port = first.socket.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serve\.port={port}: cannot listen there"):
            Address("127.0.0.1", port)
        first.listen()
        with pytest.raises(ConfigError, match=rf"serve\.port={port}: cannot listen there"):
            Address("127.0.0.1", port)


def test_a_port_can_be_had_again_although_a_connection_to_it_was_closed_just_now() -> None:
    with Address("127.0.0.1", 0) as first:
        host, port = first.socket.getsockname()
        first.listen()
        with socket.create_connection((host, port)):
            # Whoever closes first keeps the connection's remains.
            first.socket.accept()[0].close()
    with Address(host, port) as second:
        second.listen()


def test_a_host_that_is_not_this_machine_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"serve\.host=192\.0\.2\.1 .*cannot listen there"):
        Address("192.0.2.1", 0)


def test_files_that_are_no_certificate_and_an_encrypted_key_are_refused(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text("no certificate")
    key.write_text("no key")
    with pytest.raises(ConfigError, match=r"serve\.tls_cert="):
        check_tls(cert, key)
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -passout pass:x -subj /CN=localhost"
    subprocess.run(["openssl", *words.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"serve\.tls_key="):
        check_tls(cert, key)
