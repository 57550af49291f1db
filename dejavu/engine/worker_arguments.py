"""Where a worker's spec comes from: its launcher's line, or a command line and the cluster's declared state."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dejavu.clock import Clock
from dejavu.config.declared import DeclaredState, read_declared
from dejavu.control.member import decode_member
from dejavu.engine.worker_spec import WorkerSpec, decode_worker_spec
from dejavu.errors import ConfigError, Fatal, nearest
from dejavu.ids import WorkerName
from dejavu.store.client import StoreClient
from dejavu.store.faults import StoreUnavailable
from dejavu.store.keys import Keys
from dejavu.store.spec import StoreSpec
from dejavu.transport.interface import address_of, address_towards, check_address

SECRET = "DEJAVU_CLUSTER_SECRET"
PASSWORD = "DEJAVU_STORE_PASSWORD"
USAGE = "python -m dejavu.worker store.endpoints=[HOST:PORT,...] cluster.name=NAME name=WORKER [host=ADDRESS]"
_KEYS = (
    "store.endpoints",
    "store.ca_cert",
    "store.cert",
    "store.key",
    "store.user",
    "store.timeout_s",
    "cluster.name",
    "name",
    "host",
    "kv_folder",
    "wait_s",
)
_LOOK_S = 0.5
_TAKEN_S = 2.0
"""Beyond its lease, a worker that has died may still be registered for so long."""
_WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """What a command line says."""

    store: StoreSpec
    cluster: str
    name: WorkerName
    secret: str
    host: str | None = None
    """Address or interface to publish; None: the address that leads to the store."""
    kv_folder: str | None = None
    wait_s: float = _WAIT_S
    """How long a cluster of that name may take to be declared."""

    def __repr__(self) -> str:
        return f"WorkerArguments(name={self.name!r}, cluster={self.cluster!r})"


def read_arguments(words: Sequence[str], environment: Mapping[str, str]) -> WorkerArguments:
    """The arguments of a command line. Raises ConfigError naming what is wrong or missing."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals:
            raise ConfigError(f"{word}: no such key\n{nearest(key, _KEYS)}\nusage: {USAGE}")
        given[key] = value
    missing = [key for key in ("store.endpoints", "cluster.name", "name") if not given.get(key)]
    if missing:
        raise ConfigError(f"{missing[0]} is needed\nusage: {USAGE}")
    secret = environment.get(SECRET)
    if not secret:
        raise ConfigError(f"{SECRET} must stand in the environment, as it does in the controller's")
    return WorkerArguments(
        store=_store(given, environment),
        cluster=Keys(given["cluster.name"]).cluster,
        name=WorkerName(given["name"]),
        secret=secret,
        host=given.get("host"),
        kv_folder=given.get("kv_folder"),
        wait_s=_number("wait_s", given.get("wait_s"), _WAIT_S),
    )


def owned_spec(line: bytes) -> WorkerSpec:
    """The spec in the line of a launcher. Raises Fatal where there is none."""
    if not line:
        raise Fatal(f"a worker reads its spec as one JSON line on standard input, and there was none\nor: {USAGE}")
    return decode_worker_spec(line)


def await_spec(words: Sequence[str], environment: Mapping[str, str], clock: Clock) -> WorkerSpec:
    """The spec that the cluster's declaration gives this worker, once somebody leads a cluster of that name.

    Waits, too, for the lease of a dead worker of the same name. Raises ConfigError for a command line or a declaration
    that is wrong and for the name of a worker that lives, Fatal when it takes too long.
    """
    arguments = read_arguments(words, environment)
    host = address_of(arguments.host) if arguments.host else address_towards(arguments.store.endpoints[0])
    check_address("host", host)
    with contextlib.closing(StoreClient(arguments.store)) as client:
        return _awaited(arguments, host, client, clock)


def _awaited(arguments: WorkerArguments, host: str, client: StoreClient, clock: Clock) -> WorkerSpec:
    keys, deadline_s = Keys(arguments.cluster), clock.monotonic() + arguments.wait_s
    taken_since_s: float | None = None
    while True:
        try:
            entry, controller = client.get(keys.spec), client.get(keys.controller)
            holder = client.get(keys.worker(arguments.name))
            problem = f"nobody leads a cluster {arguments.cluster}"
        except StoreUnavailable as error:
            entry, controller, holder, problem = None, None, None, str(error)
        if entry is not None and controller is not None:
            declared = read_declared(entry.value)
            if holder is None:
                return _spec(arguments, host, declared)
            taken_since_s = clock.monotonic() if taken_since_s is None else taken_since_s
            if clock.monotonic() - taken_since_s >= declared.cluster.lease_ttl_s + _TAKEN_S:
                raise _taken(arguments, holder.value)
        elif clock.monotonic() >= deadline_s:
            raise Fatal(f"{problem}; waited for wait_s={arguments.wait_s:g}")
        clock.sleep(_LOOK_S)


def _taken(arguments: WorkerArguments, holder: bytes) -> ConfigError:
    """Two of one name would be taken for one another, by each of their peers for the one that it has met."""
    text = f"name={arguments.name}: cluster {arguments.cluster} has a worker of that name that lives"
    try:
        other = decode_member(holder)
    except msgspec.DecodeError:
        return ConfigError(text)
    return ConfigError(
        f"{text}: incarnation {other.incarnation}, process {other.pid} on {other.host}\nchoose another, or end that one"
    )


def _spec(arguments: WorkerArguments, host: str, declared: DeclaredState) -> WorkerSpec:
    return WorkerSpec(
        name=arguments.name,
        cluster=arguments.cluster,
        secret=arguments.secret,
        store=arguments.store,
        host=host,
        lease_ttl_s=declared.cluster.lease_ttl_s,
        device=declared.cluster.device.value,
        transport_kind=declared.transport.kind.value,
        transport_settings=dict(declared.transport.settings),
        start_timeout_s=declared.cluster.start_timeout_s,
        kv_folder=arguments.kv_folder,
    )


def _store(given: Mapping[str, str], environment: Mapping[str, str]) -> StoreSpec:
    listed = given["store.endpoints"].strip()
    # The brackets of an IPv6 address are not the list's.
    listed = listed[1:-1] if listed.startswith("[") and listed.endswith("]") else listed
    endpoints = listed.split(",")
    user = given.get("store.user")
    return StoreSpec(
        endpoints=tuple(endpoint.strip() for endpoint in endpoints if endpoint.strip()),
        ca_cert=given.get("store.ca_cert"),
        cert=given.get("store.cert"),
        key=given.get("store.key"),
        user=user,
        password=None if user is None else environment.get(PASSWORD),
        timeout_s=_number("store.timeout_s", given.get("store.timeout_s"), 2.0),
    )


def _number(key: str, value: str | None, default: float) -> float:
    try:
        return default if value is None else float(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value}: must be a number of seconds") from error
