"""TLS, client certificates and users, with certificates made on the spot by the openssl command."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dejavu.store import LeaseKeeper, PrefixWatch, StoreClient, StoreRefused, StoreSpec, StoreUnavailable
from dejavu.store.embedded import etcd_binary, free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="the openssl command, which makes certificates, is missing"
    ),
]

PATIENCE_S = 30.0
PASSWORD = "swordfish-99"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificates:
    """A folder of PEM files: authorities ``ca`` and ``other``; ``server`` and ``alice`` by ca, ``mallory`` by other."""

    folder: Path

    def pem(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.key")


def make_certificates(folder: Path) -> Certificates:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("ca", "other"):
        openssl("req", "-x509", *NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name, authority in (("server", "ca"), ("alice", "ca"), ("mallory", "other")):
        openssl("req", *NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return Certificates(folder)


class SecuredEtcd:
    """An etcd with the flags that a test needs; ``restart`` keeps port and data."""

    def __init__(self, folder: Path, scheme: str, *flags: str) -> None:
        client_port, peer_port = free_ports(2)
        self.endpoint = f"127.0.0.1:{client_port}"
        self.url = f"{scheme}://{self.endpoint}"
        self._log_path = folder / "etcd.log"
        self._command = [
            str(etcd_binary()),
            f"--data-dir={folder / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--heartbeat-interval=50",
            "--election-timeout=500",
            "--log-level=error",
            "--unsafe-no-fsync",
            *flags,
        ]
        self._start()

    def _start(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.stop()
        self._start()

    def etcdctl(self, *arguments: str) -> None:
        binary = etcd_binary().parent / "etcdctl"
        subprocess.run([str(binary), f"--endpoints={self.url}", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_etcd(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[SecuredEtcd]:
    """An etcd that shows the server's certificate and wants one of its clients."""
    etcd = SecuredEtcd(
        tmp_path_factory.mktemp("tls"),
        "https",
        f"--cert-file={certificates.pem('server')}",
        f"--key-file={certificates.key('server')}",
        f"--trusted-ca-file={certificates.pem('ca')}",
        "--client-cert-auth",
    )
    yield etcd
    etcd.stop()


@pytest.fixture(scope="module")
def users_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredEtcd]:
    """An etcd without TLS, with the users root (may do all) and ann (reads and writes /dejavu/)."""
    etcd = SecuredEtcd(tmp_path_factory.mktemp("users"), "http")
    with contextlib.closing(StoreClient(StoreSpec(endpoints=(etcd.endpoint,), timeout_s=PATIENCE_S))) as client:
        client.get("/ready")
    etcd.etcdctl("user", "add", f"root:{PASSWORD}")
    etcd.etcdctl("user", "grant-role", "root", "root")
    etcd.etcdctl("role", "add", "dejavu")
    etcd.etcdctl("role", "grant-permission", "dejavu", "--prefix=true", "readwrite", "/dejavu/")
    etcd.etcdctl("user", "add", f"ann:{PASSWORD}")
    etcd.etcdctl("user", "grant-role", "ann", "dejavu")
    etcd.etcdctl("auth", "enable")
    yield etcd
    etcd.stop()


def tls_spec(etcd: SecuredEtcd, certificates: Certificates, name: str = "alice", authority: str = "ca") -> StoreSpec:
    return StoreSpec(
        endpoints=(etcd.endpoint,),
        ca_cert=certificates.pem(authority),
        cert=certificates.pem(name),
        key=certificates.key(name),
        timeout_s=10.0,
    )


def user_spec(etcd: SecuredEtcd, user: str = "ann", password: str = PASSWORD) -> StoreSpec:
    return StoreSpec(endpoints=(etcd.endpoint,), user=user, password=password, timeout_s=10.0)


def refusal(spec: StoreSpec) -> str:
    """What a refused call says."""
    with contextlib.closing(StoreClient(spec)) as client, pytest.raises(StoreRefused) as refused:
        client.put("/dejavu/c/k", b"")
    return str(refused.value)


def assert_all_parts_work(spec: StoreSpec) -> None:
    """Client, watch and keeper get through, and the password is in no command line of theirs."""
    seen = threading.Event()
    watch = PrefixWatch(spec, "/dejavu/c/", lambda change: seen.set() if change.puts else None)
    keeper = LeaseKeeper(spec, 5.0, {"/dejavu/c/workers/w0": b"alive"})
    try:
        assert keeper.wait_held(PATIENCE_S)
        assert seen.wait(PATIENCE_S)
        with contextlib.closing(StoreClient(spec)) as client:
            assert client.get("/dejavu/c/workers/w0") is not None
    finally:
        keeper.close()
        watch.stop()


def test_tls_with_client_certificate_serves_client_watch_and_keeper(
    tls_etcd: SecuredEtcd, certificates: Certificates
) -> None:
    assert_all_parts_work(tls_spec(tls_etcd, certificates))


def test_tls_wrong_authority_is_refused_naming_the_file(tls_etcd: SecuredEtcd, certificates: Certificates) -> None:
    message = refusal(tls_spec(tls_etcd, certificates, authority="other"))
    assert tls_etcd.endpoint in message
    assert certificates.pem("other") in message
    assert "does not vouch" in message


def test_tls_wrong_client_certificate_is_refused_naming_the_file(
    tls_etcd: SecuredEtcd, certificates: Certificates
) -> None:
    assert certificates.pem("mallory") in refusal(tls_spec(tls_etcd, certificates, name="mallory"))


def test_tls_without_client_certificate_is_refused_naming_the_setting(
    tls_etcd: SecuredEtcd, certificates: Certificates
) -> None:
    spec = StoreSpec(endpoints=(tls_etcd.endpoint,), ca_cert=certificates.pem("ca"))
    assert "store.cert" in refusal(spec)


def test_tls_missing_file_is_refused_naming_it(tls_etcd: SecuredEtcd) -> None:
    assert "/nowhere.pem" in refusal(StoreSpec(endpoints=(tls_etcd.endpoint,), ca_cert="/nowhere.pem"))


def test_plain_client_of_a_tls_server_hears_of_tls(tls_etcd: SecuredEtcd) -> None:
    spec = StoreSpec(endpoints=(tls_etcd.endpoint,), timeout_s=0.3)
    with contextlib.closing(StoreClient(spec)) as client, pytest.raises(StoreUnavailable, match=r"store\.ca_cert"):
        client.get("/k")


def test_user_without_tls_serves_client_watch_and_keeper(users_etcd: SecuredEtcd) -> None:
    assert_all_parts_work(user_spec(users_etcd))


def test_user_wrong_password_is_refused_without_telling_it(users_etcd: SecuredEtcd) -> None:
    message = refusal(user_spec(users_etcd, password="wrong-password"))
    assert users_etcd.endpoint in message
    assert "'ann'" in message
    assert "wrong-password" not in message


def test_user_outside_of_the_permitted_keys_is_refused(users_etcd: SecuredEtcd) -> None:
    with (
        contextlib.closing(StoreClient(user_spec(users_etcd))) as client,
        pytest.raises(StoreRefused, match="permission denied"),
    ):
        client.put("/elsewhere", b"")


def test_no_user_where_users_are_asked_for_is_refused_with_the_remedy(users_etcd: SecuredEtcd) -> None:
    assert "store.user" in refusal(StoreSpec(endpoints=(users_etcd.endpoint,)))


def test_user_token_lost_in_a_restart_is_renewed(users_etcd: SecuredEtcd) -> None:
    with contextlib.closing(StoreClient(user_spec(users_etcd))) as client:
        client.put("/dejavu/c/k", b"1")
        users_etcd.restart()
        client.put("/dejavu/c/k", b"2")


def test_user_token_that_etcd_does_not_know_is_renewed_once(users_etcd: SecuredEtcd) -> None:
    from dejavu.store.connection import Connection

    connection = Connection(user_spec(users_etcd), users_etcd.endpoint)
    try:
        connection._token = (("token", "forgotten.1"),)
        request = connection.rpc.RangeRequest(key=b"/dejavu/c/k")
        connection.call(connection.kv.Range, request, PATIENCE_S)
    finally:
        connection.close()
