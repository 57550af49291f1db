"""Workers that nobody here starts: their command line, their spec, and their end with their cluster."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from dejavu import worker
from dejavu.clock import VirtualClock
from dejavu.config import Config, LauncherKind, StoreKind, validate
from dejavu.config.declared import declared_state, read_declared
from dejavu.control.member import encode_json
from dejavu.engine.leader import LeaderWatch
from dejavu.engine.linking import ControllerGone, Linking, StoppedEarly
from dejavu.engine.mailbox import Mailbox
from dejavu.engine.worker_arguments import await_spec, owned_spec, read_arguments
from dejavu.errors import ConfigError, Fatal
from dejavu.ids import Epoch, WorkerName
from dejavu.store.keys import Keys
from dejavu.transport.base import Hello
from dejavu.transport.interface import address_of, address_towards
from operators.elsewhere import StartedElsewhere
from operators.launcher import Launcher
from operators.ray_launcher import import_ray

from harness.made_up_launcher import member
from harness.plans import colocated_plan

WORDS = ["store.endpoints=[10.0.0.1:2379,10.0.0.2:2379]", "cluster.name=mine", "name=w3"]
ENVIRONMENT = {"DEJAVU_CLUSTER_SECRET": "long-enough-to-be-one"}


def test_a_command_line_says_where_the_cluster_is_and_the_environment_how_to_be_let_in() -> None:
    found = read_arguments([*WORDS, "host=eth7", "wait_s=5"], ENVIRONMENT)
    assert found.store.endpoints == ("10.0.0.1:2379", "10.0.0.2:2379")
    assert (found.cluster, found.name, found.host, found.wait_s) == ("mine", "w3", "eth7", 5.0)
    assert "long-enough" not in repr(found)


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([*WORDS, "nme=x"], ENVIRONMENT, "did you mean 'name'"),
        (WORDS[:2], ENVIRONMENT, "name is needed"),
        (WORDS, {}, "DEJAVU_CLUSTER_SECRET must stand in the environment"),
        (["store.endpoints=[nowhere]", *WORDS[1:]], ENVIRONMENT, "'nowhere' is not host:port"),
        ([*WORDS, "wait_s=soon"], ENVIRONMENT, "wait_s=soon"),
        (["store.endpoints=a:1", "cluster.name=a/b", "name=w0"], ENVIRONMENT, "cluster name 'a/b'"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(words: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments(words, environment)


def test_a_worker_waits_for_its_cluster_and_says_for_how_long() -> None:
    words = ["store.endpoints=127.0.0.1:1", *WORDS[1:], "host=lo", "wait_s=1", "store.timeout_s=0.1"]
    with pytest.raises(Fatal, match="waited for wait_s=1"):
        await_spec(words, ENVIRONMENT, VirtualClock())
    with pytest.raises(Fatal, match="there was none"):
        owned_spec(b"")


def test_an_interface_stands_for_its_address_and_a_name_for_itself() -> None:
    assert (address_of("lo"), address_of("some.host"), address_of("10.1.2.3")) == ("127.0.0.1", "some.host", "10.1.2.3")
    assert address_towards("127.0.0.1:2379") == "127.0.0.1"
    with pytest.raises(ConfigError, match="cannot be reached from here"):
        address_towards("no-such-host.invalid:1")


def test_the_clusters_secret_is_not_in_its_declared_state() -> None:
    config = Config()
    config.cluster.secret = "a-secret-of-the-cluster"
    assert b"a-secret" not in encode_json(declared_state(config))
    assert read_declared(encode_json(declared_state(config))).cluster.secret is None
    assert "a-secret" not in repr(config)


def test_a_cluster_of_workers_started_elsewhere_needs_a_secret() -> None:
    config = Config()
    config.cluster.launcher = LauncherKind.none
    with pytest.raises(ConfigError, match="DEJAVU_CLUSTER_SECRET"):
        validate(config)
    config.cluster.secret = "short"
    with pytest.raises(ConfigError, match="at least 16"):
        validate(config)


class Looks:
    """A view and a mailbox in one: what each look at them finds, and how often was looked."""

    def __init__(self, leaders: list[str | None], led: list[bool]) -> None:
        self._leaders = leaders
        self._led = led
        self.num = 0

    def controller(self) -> object:
        incarnation = self._leaders[min(self.num, len(self._leaders) - 1)]
        self.num += 1
        return None if incarnation is None else SimpleNamespace(incarnation=incarnation)

    def is_led(self) -> bool:
        return self._led[min(self.num, len(self._led)) - 1]


@pytest.mark.parametrize(
    ("leaders", "led", "num_looks"),
    [
        (["one", "one", "two"], [True], 3),
        # 11 s with a lease of 2 s, in looks of half a second.
        ([None], [False], 22),
        (["one", None], [True] * 50 + [False], 72),
    ],
    ids=["another controller leads", "nobody does", "the controller is cut off from the store, and then ends"],
)
def test_a_worker_ends_when_another_controller_leads_or_none_does_and_no_link_says_otherwise(
    leaders: list[str | None], led: list[bool], num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that could not reach the store for 20 s used to lose all its workers, linked to it as they were."""
    monkeypatch.setattr("dejavu.engine.leader.time", SimpleNamespace(sleep=lambda seconds: None))
    looks, gone = Looks(leaders, led), threading.Event()
    LeaderWatch(looks, gone.set, looks.is_led, lease_ttl_s=2).start()  # type: ignore[arg-type]
    assert gone.wait(10.0)
    assert looks.num == num_looks


class Store:
    """A client of a cluster in which workers may live; ``after_s`` is how long w3's key stays."""

    def __init__(self, clock: VirtualClock, after_s: float) -> None:
        self._clock = clock
        self._after_s = after_s
        keys = Keys("mine")
        self._values = {keys.spec: encode_json(declared_state(Config())), keys.controller: b"{}"}
        self._worker = keys.worker("w3")

    def get(self, key: str) -> object:
        if key == self._worker and self._clock.monotonic() < self._after_s:
            return SimpleNamespace(value=encode_json(member(WorkerName("w3"))))
        return SimpleNamespace(value=self._values[key]) if key in self._values else None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("after_s", [0.0, 6.5])
def test_a_worker_waits_for_the_lease_of_a_dead_one_of_its_name(
    after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("dejavu.engine.worker_arguments.StoreClient", lambda spec: Store(clock, after_s))
    spec = await_spec([*WORDS, "host=lo"], ENVIRONMENT, clock)
    assert (spec.name, spec.host, clock.monotonic() >= after_s) == ("w3", "127.0.0.1", True)


def test_a_second_worker_of_a_name_is_refused_naming_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers used to be linked to the one and the controller to the other."""
    clock = VirtualClock()
    monkeypatch.setattr("dejavu.engine.worker_arguments.StoreClient", lambda spec: Store(clock, 1e9))
    with pytest.raises(ConfigError, match=r"name=w3: cluster mine has a worker .* incarnation i, process 1 on h"):
        await_spec([*WORDS, "host=lo"], ENVIRONMENT, clock)


def test_an_ipv6_address_is_refused_before_anything_is_linked() -> None:
    with pytest.raises(ConfigError, match="host=fd00::1: links are made over IPv4"):
        await_spec([*WORDS, "host=fd00::1"], ENVIRONMENT, VirtualClock())
    config = Config()
    config.cluster.host = "fd00::1"
    with pytest.raises(ConfigError, match=r"cluster.host='fd00::1'.*IPv4"):
        validate(config)
    found = read_arguments(["store.endpoints=[fd00::1]:2379", *WORDS[1:]], ENVIRONMENT)
    assert found.store.endpoints == ("[fd00::1]:2379",)


def test_an_interrupt_while_a_worker_waits_for_its_cluster_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dejavu.worker.await_spec", interrupted)
    assert worker.main(WORDS) == 130


@pytest.mark.parametrize(
    ("follows", "leader", "is_well"),
    [(True, None, True), (True, "one", False), (False, None, False)],
    ids=["nobody leads", "its controller leads and does not reach it", "a launcher owns it"],
)
def test_a_worker_that_its_controller_has_left_ends_well_where_nobody_leads(
    follows: bool, leader: str | None, is_well: bool
) -> None:
    problems: list[str] = []

    def gone() -> None:
        raise ControllerGone("the controller is gone: reset")

    stand = SimpleNamespace(
        _serve=gone,
        _follows_leader=follows,
        _view=SimpleNamespace(controller=lambda: leader),
        _register=lambda state, problem: problems.append(problem),
    )
    with contextlib.nullcontext() if is_well else pytest.raises(ControllerGone):
        worker.WorkerProcess.run(stand)  # type: ignore[arg-type]
    assert problems == ([] if is_well else ["the controller is gone: reset"])


def test_a_worker_that_was_asked_to_stop_before_it_serves_has_no_problem_to_tell() -> None:
    """It used to tell it to whoever led by then, and that controller took it for a failure of its own cluster."""
    problems: list[str] = []

    def stopped() -> None:
        raise StoppedEarly

    stand = SimpleNamespace(_serve=stopped, _register=lambda state, problem: problems.append(problem))
    worker.WorkerProcess.run(stand)  # type: ignore[arg-type]
    assert problems == []


def test_a_worker_is_for_good_whose_plan_it_took() -> None:
    leaders = iter(["one", "two"])
    stand = SimpleNamespace(
        _leader=None,
        _is_stopping=False,
        _served_epoch=None,
        _incarnation="i",
        _spec=SimpleNamespace(name=WorkerName("w0")),
        _view=SimpleNamespace(
            plan=lambda: colocated_plan(2), controller=lambda: SimpleNamespace(incarnation=next(leaders))
        ),
    )
    stand._follow = lambda: worker.WorkerProcess._follow(stand)  # type: ignore[arg-type]
    assert worker.WorkerProcess._find_role(stand) is not None  # type: ignore[arg-type]
    assert stand._leader == "one", "not only once its stage is loaded"
    stand._follow()
    assert stand._leader == "one"


def test_a_mailbox_knows_whether_a_controller_is_linked() -> None:
    box = Mailbox(cluster="c", epoch=lambda: Epoch(1), fingerprint=lambda: "")
    hellos = [Hello(cluster="c", name=name, incarnation="i", epoch=1) for name in ("w1", "controller", "controller")]
    states = []
    for hello in hellos:
        box.admit(hello)
        states.append(box.is_led())
    # The new epoch's link is up before the old one's end is seen.
    for hello in hellos:
        box.lost(hello, "closed")
        states.append(box.is_led())
    assert states == [False, True, True, True, True, False]


@pytest.mark.parametrize(("leader", "address"), [("one", "127.0.0.1:1"), (None, "127.0.0.1:1"), ("zero", None)])
def test_a_worker_that_another_controller_has_left_behind_is_no_peer(leader: str | None, address: str | None) -> None:
    view = SimpleNamespace(
        member=lambda name: member(WorkerName(name), leader=leader),
        controller=lambda: SimpleNamespace(incarnation="one"),
        is_superseded=lambda plan: False,
    )
    linking = Linking(
        colocated_plan(2),
        WorkerName("w0"),
        None,  # type: ignore[arg-type]
        view,  # type: ignore[arg-type]
        VirtualClock(),
        is_stopping=lambda: False,
        timeout_s=1.0,
    )
    assert linking._ready_address("w1") == address


def test_the_launcher_of_workers_started_elsewhere_starts_and_ends_nobody(tmp_path: Path) -> None:
    launcher: Launcher = StartedElsewhere(tmp_path)
    name = WorkerName("w0")
    launcher.start(name)
    launcher.kill(name)
    launcher.signal(name, 9)
    launcher.tell(name, b"x")
    assert (launcher.running(), launcher.pids(), launcher.exits(), launcher.pid_of(name)) == (frozenset(), {}, (), None)
    assert not launcher.is_stopping()
    launcher.stop()
    assert launcher.is_stopping()
    assert not launcher.log_of(name).exists()


def test_ray_needs_a_store_and_a_controller_that_other_nodes_reach_and_says_when_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config()
    config.cluster.launcher, config.workload.max_tokens = LauncherKind.ray, 8
    with pytest.raises(ConfigError, match="needs store=external"):
        validate(config)
    config.store.kind, config.store.endpoints = StoreKind.external, ["10.0.0.1:2379"]
    with pytest.raises(ConfigError, match=r"cluster.host=127.0.0.1: workers on other nodes cannot reach it"):
        validate(config)
    config.cluster.host = "10.0.0.1"
    validate(config)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'dejavu\[ray\]'"):
        import_ray()
