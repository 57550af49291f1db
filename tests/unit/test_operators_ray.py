"""Workers that Ray places, over a Ray that is made up: late places, starts that fail, the end of the run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.errors import ConfigError
from dejavu.ids import WorkerName
from operators.ray_launcher import RayLauncher

from harness.made_up_ray import MadeUpRay, RayTaskError

W0 = WorkerName("w0")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MadeUpRay:
    made = MadeUpRay()
    monkeypatch.setattr("operators.ray_launcher.import_ray", lambda: made)
    return made


@pytest.fixture
def ended() -> threading.Event:
    return threading.Event()


@pytest.fixture
def launcher(ray: MadeUpRay, ended: threading.Event) -> Iterator[RayLauncher]:
    made = launcher_of(ended)
    yield made
    for actor in ray.actors:
        actor.die()
    made.stop()


def launcher_of(ended: threading.Event) -> RayLauncher:
    return RayLauncher(lambda name: b"spec", Path("logs"), num_threads=1, num_gpus=0, on_exit=ended.set, address="auto")


def test_a_worker_that_is_killed_before_ray_has_placed_it_never_starts(launcher: RayLauncher, ray: MadeUpRay) -> None:
    """Its signal used to come before its start: once there was room, two workers of one name began."""
    launcher.start(W0)
    launcher.kill(W0)
    (first,) = ray.actors
    assert first.is_dead.wait(10.0)
    assert launcher.running() == frozenset()
    launcher.start(W0)
    second = ray.actors[1]
    second.give("address", "10.0.0.2")
    second.give("start", 71)
    assert second.called["wait"].wait(10.0)
    assert launcher.pids() == {W0: 71}
    assert not first.called["start"].is_set()
    launcher.kill(W0)
    assert (second.signals, second.is_dead.is_set()) == ([signal.SIGKILL], False)


def test_a_worker_that_was_placed_in_the_moment_in_which_it_was_killed_does_not_start(
    launcher: RayLauncher, ray: MadeUpRay
) -> None:
    launcher.start(W0)
    (actor,) = ray.actors
    actor.give("address", "10.0.0.2")
    assert actor.called["start"].wait(10.0)
    launcher.kill(W0)
    assert actor.is_dead.is_set()
    assert (launcher.exits(), launcher.running()) == ((), frozenset())


def test_a_worker_whose_start_fails_gives_its_place_back_and_the_log_says_why(
    launcher: RayLauncher, ray: MadeUpRay, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to keep its CPUs, and its node was said to be gone."""
    launcher.start(W0)
    (actor,) = ray.actors
    actor.give("address", "10.0.0.2")
    actor.give("start", RayTaskError(PermissionError("logs/w0.log")))
    assert ended.wait(10.0)
    assert [gone.text for gone in launcher.exits()] == ["exit status 1"]
    assert actor.is_dead.is_set()
    assert "cannot be started on its node: logs/w0.log" in caplog.text


def test_a_lost_actor_is_an_end_like_any_other(
    launcher: RayLauncher, ray: MadeUpRay, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    launcher.start(W0)
    (actor,) = ray.actors
    actor.give("address", "10.0.0.2")
    actor.give("start", 71)
    assert actor.called["wait"].wait(10.0)
    actor.die()
    assert ended.wait(10.0)
    assert [(gone.text, gone.pid) for gone in launcher.exits()] == [("killed by signal 9", 71)]
    assert "its node or its actor is gone" in caplog.text


def test_the_end_of_the_run_does_not_wait_for_workers_that_were_never_placed(
    launcher: RayLauncher, ray: MadeUpRay
) -> None:
    for name in ("w0", "w1", "w2"):
        launcher.start(WorkerName(name))
    launcher.stop()
    assert all(actor.is_dead.is_set() and not actor.signals for actor in ray.actors)
    assert launcher.exits() == ()
    launcher.stop()


def test_a_ray_cluster_of_another_version_is_the_users_to_mend(ray: MadeUpRay, ended: threading.Event) -> None:
    def refuse() -> None:
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.9")

    ray.on_init = refuse
    with pytest.raises(ConfigError, match=r"(?s)cluster.ray_address=auto.*Version mismatch"):
        launcher_of(ended)
