"""One channel to one etcd member, logged in where users are declared."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc

from dejavu.store.descriptors import import_etcd3
from dejavu.store.faults import StoreRefused, StoreUnavailable, has_own_meaning, is_stale_token, translate, unreadable
from dejavu.store.spec import StoreSpec

# No keepalive: an etcd member closes healthy connections that ping more often than it likes (too_many_pings).
# Sub-channels of its own, so that a new connection does not inherit an old one's reconnect back-off.
# No web proxy: etcd belongs to the cluster's own network, and a proxy variable would even catch the loopback.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)


Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Connection:
    """A channel with etcd's stubs. Any thread; closed when retired and no call holds it any more.

    ``rpc`` holds the message classes; ``kv``, ``leases``, ``watches`` and ``members`` are the stubs.
    """

    def __init__(self, spec: StoreSpec, endpoint: str) -> None:
        etcd3 = import_etcd3()
        self.endpoint = endpoint
        self._spec = spec
        self._token: Metadata | None = None
        host, _, port = endpoint.rpartition(":")
        try:
            # Users log in below: this class's own way cannot do so without TLS and never renews the token.
            client = etcd3.Etcd3Client(
                host=host,
                port=int(port),
                ca_cert=spec.ca_cert,
                cert_cert=spec.cert,
                cert_key=spec.key,
                timeout=spec.timeout_s,
                grpc_options=_CHANNEL_OPTIONS,
            )
        except OSError as error:
            raise unreadable(error, spec) from error
        self._channel: Any = client.channel
        self.rpc: Any = etcd3.etcdrpc
        self.kv: Any = client.kvstub
        self.leases: Any = client.leasestub
        self.watches: Any = self.rpc.WatchStub(client.channel)
        self.members: Any = client.clusterstub
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._closed = False
        self._answered = False

    def call(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        """The response of one unary call; logs in first where needed, and once again when the token has gone stale.

        Raises StoreUnavailable or StoreRefused; an error that ``has_own_meaning`` stays a ``grpc.RpcError``.
        """
        with self._translated():
            try:
                answer = method(request, timeout_s, metadata=self.metadata(timeout_s))
            except grpc.RpcError as error:
                if self._spec.user is None or not is_stale_token(error):
                    raise
                self._token = None
                answer = method(request, timeout_s, metadata=self.metadata(timeout_s))
            self._answered = True
            return answer

    def stream(self, method: Callable[..., Any], request: Any, headers: Metadata, login_timeout_s: float) -> Any:
        """The responses of a stream that is opened by one request and stays open. Raises like ``call``."""
        with self._translated():
            return method(iter([request]), metadata=(*self.metadata(login_timeout_s), *headers))

    def keep_alive(self, lease_id: int, timeout_s: float) -> int:
        """The seconds that the lease, now refreshed, has left; 0 when etcd does not hold it. Raises like ``call``."""

        def method(request: Any, timeout_s: float, metadata: Any) -> int:
            remaining_s = 0
            for response in self.leases.LeaseKeepAlive(iter([request]), timeout_s, metadata=metadata):
                remaining_s = response.TTL
            return remaining_s

        return int(self.call(method, self.rpc.LeaseKeepAliveRequest(ID=lease_id), timeout_s))

    def metadata(self, timeout_s: float) -> Metadata:
        """What a call sends along: the user's token, fetched on first use."""
        if self._spec.user is None:
            return ()
        token = self._token
        if token is None:
            request = self.rpc.AuthenticateRequest(name=self._spec.user, password=self._spec.password)
            answer = self.rpc.AuthStub(self._channel).Authenticate(request, timeout_s)
            # As plain metadata: gRPC drops call credentials on a connection without TLS.
            token = self._token = (("token", answer.token),)
        return token

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            if has_own_meaning(error):
                raise
            raise self.translated(error) from error
        except ValueError as error:
            # gRPC's answer to a call on a closed channel.
            if not self._closed:
                raise
            raise StoreUnavailable(f"the connection to etcd at {self.endpoint} was closed") from error

    def translated(self, error: grpc.RpcError) -> StoreUnavailable | StoreRefused:
        """The error to raise instead of ``error``, which came out of this connection."""
        return translate(error, self.endpoint, self._spec, first_contact=not self._answered)

    def hold(self) -> None:
        """The connection stays open until ``release``, even when it is retired meanwhile."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """One ``hold`` is undone; the last one closes a retired connection."""
        with self._lock:
            self._users -= 1
            last = self._retired and self._users == 0
        if last:
            self.close()

    def retire(self) -> None:
        """The connection closes as soon as nobody holds it; calls in flight end undisturbed."""
        with self._lock:
            self._retired = True
            idle = self._users == 0
        if idle:
            self.close()

    def close(self) -> None:
        """The channel is gone and every call on it has failed. Idempotent."""
        self._closed = True
        self._channel.close()
