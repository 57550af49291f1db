"""A worker process: ``python -m dejavu.worker``, its spec as one JSON line on standard input, or arguments.

It registers, learns its role from the plan, builds its stage, links to its peers and serves: in one epoch after the
other, until it is told to stop, declared dead, or its launcher is gone (with arguments: its controller). Heavy imports
come after the registration, so that a slow start is seen as a start. Further lines on standard input are faults.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.clock import SystemClock
from dejavu.control.member import MemberState, encode_json
from dejavu.control.plan import Place, Plan
from dejavu.engine.cluster_view import ClusterView
from dejavu.engine.gaps import in_the_gaps
from dejavu.engine.injected import InjectedFaults
from dejavu.engine.leader import LeaderWatch
from dejavu.engine.lines import read_line
from dejavu.engine.linking import ControllerGone, DeclaredDead, Linking, StoppedEarly, Superseded
from dejavu.engine.mailbox import Mailbox, PeerLost, Wake
from dejavu.engine.peers import Peers
from dejavu.engine.registration import Registration
from dejavu.engine.worker_arguments import await_spec, owned_spec
from dejavu.engine.worker_spec import WorkerSpec
from dejavu.errors import ConfigError, DejavuError
from dejavu.ids import FIRST_EPOCH, Epoch, IncarnationId
from dejavu.report.logs import WorkerLog
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper
from dejavu.transport.base import Hello
from dejavu.transport.factory import make_transport

if TYPE_CHECKING:
    from dejavu.engine.build import BuiltStage
    from dejavu.engine.kept import Kept

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Role:
    """What a plan wants of this worker: a place, or to stand by."""

    plan: Plan | None
    place: Place | None


class WorkerProcess:
    """One incarnation of a worker, from registration to exit."""

    def __init__(self, spec: WorkerSpec, log: WorkerLog) -> None:
        self._spec = spec
        self._log = log
        self._keys = Keys(spec.cluster)
        self._incarnation = IncarnationId(uuid.uuid4().hex[:12])
        self._clock = SystemClock()
        self._plan: Plan | None = None
        self._served_epoch: Epoch | None = None
        self._leader: str | None = None
        self._follows_leader = False
        self._is_stopping = False
        self._mailbox = Mailbox(
            cluster=spec.cluster,
            epoch=lambda: None if self._plan is None else self._plan.epoch,
            fingerprint=lambda: "" if self._plan is None else self._plan.model.layout.fingerprint,
        )
        self._transport = make_transport(spec.transport_kind, spec.secret, spec.transport_settings)
        address = self._transport.listen(self._mailbox, host=spec.host)
        self._registration = Registration(spec=spec, incarnation=self._incarnation, address=address)
        self._keeper = LeaseKeeper(
            spec.store,
            spec.lease_ttl_s,
            {self._keys.worker(spec.name): encode_json(self._registration.member("starting"))},
            guard=self._incarnation.encode(),
        )
        self._view = ClusterView(spec.store, self._keys, lambda: self._mailbox.post(Wake()))
        self._faults = InjectedFaults(self._mailbox, self._view, self._keeper)

    def run(self) -> None:
        """The worker has served and been told to stop. Raises DejavuError when it cannot go on."""
        try:
            self._serve()
        except DeclaredDead:
            # Its name is another's now: nothing may be said under it.
            raise
        except StoppedEarly as error:
            # No problem of anybody's, least of all of a controller that has come since.
            logger.info("%s", error)
        except DejavuError as error:
            if isinstance(error, ControllerGone) and self._follows_leader and self._view.controller() is None:
                logger.info("%s, and nobody leads the cluster: ending", error)
                return
            self._register("draining", problem=str(error))
            raise

    def close(self) -> None:
        """Lease, links, threads and port are gone."""
        self._faults.close()
        self._view.close()
        logger.debug("the watch has ended")
        self._keeper.close()
        logger.debug("the lease is given back")
        self._transport.close(_CLOSE_TIMEOUT_S)
        logger.info("ended")

    def follow_leader(self) -> None:
        """The worker will be asked to stop when its controller leads no more: nobody else would."""
        self._follows_leader = True
        watch = LeaderWatch(self._view, self.ask_to_stop, self._mailbox.is_led, lease_ttl_s=self._spec.lease_ttl_s)
        watch.start()

    def inject(self, line: bytes) -> None:
        """The fault in this line has been brought about, or logged as unreadable."""
        self._faults.obey(line)

    def ask_to_stop(self) -> None:
        """The main thread will end as soon as it looks up. Safe in a signal handler."""
        self._is_stopping = True
        self._mailbox.post(Wake())

    def _serve(self) -> None:
        role = self._view.wait_for(self._find_role, "a plan for this worker", self._spec.start_timeout_s)
        if role.place is None and role.plan is not None and role.plan.epoch > FIRST_EPOCH:
            # The next standby: others serve beside it.
            in_the_gaps(partial(importlib.import_module, "dejavu.engine.build"))
        from dejavu.engine.build import load_stage, load_whole, new_kept  # torch and transformers: seconds

        kept = new_kept(self._clock)
        self._faults.slows(kept)
        while True:
            plan, place = role.plan, role.place
            assert plan is not None
            self._log.set_epoch(plan.epoch)
            if place is None:
                in_the_gaps(partial(load_whole, plan, kept))
                self._register("ready")
            else:
                logger.info("%s stage %d of epoch %d", place.pipeline.kind, place.stage.index, plan.epoch)
                load_stage(plan, place, kept)
                self._serve_epoch(plan, place, kept)
            self._served_epoch = plan.epoch
            if place is not None and not self._view.is_superseded(plan):
                return
            # Without a deadline: somebody on standby may wait for ever, and a plan that has come has a role.
            role = self._view.wait_for(self._find_next_role, "another plan", float("inf"))
            if self._is_stopping:
                return

    def _serve_epoch(self, plan: Plan, place: Place, kept: Kept) -> None:
        """The epoch is over: told to stop, or a newer plan is in force."""
        from dejavu.engine.build import Surroundings, build_stage

        self._mailbox.forget()
        self._plan = plan
        start_s = kept.recorder.now()
        linking = Linking(
            plan,
            self._spec.name,
            self._make_peers(plan),
            self._view,
            self._clock,
            is_stopping=lambda: self._is_stopping,
            timeout_s=self._spec.start_timeout_s,
        )
        peers = linking.peers
        self._faults.cuts(peers)
        stage: BuiltStage | None = None
        try:
            self._register("ready", place)
            linking.connect()
            surroundings = Surroundings(
                name=self._spec.name,
                cluster=self._spec.cluster,
                mailbox=self._mailbox,
                peers=peers,
                clock=self._clock,
                reach=linking.reach,
                acknowledge=self._acknowledge,
                is_asked_to_stop=lambda: self._is_stopping,
                is_superseded=partial(self._view.is_superseded, plan),
                kv_folder=None if self._spec.kv_folder is None else Path(self._spec.kv_folder),
            )
            stage = build_stage(surroundings, plan, place, kept)
            self._register("serving", place)
            if self._served_epoch is not None:
                kept.recorder.add("rejoin", "recover", start_s, kept.recorder.now() - start_s, epoch=plan.epoch)
            stage.engine.run()
        except Superseded:
            logger.info("epoch %d is over before it began here", plan.epoch)
        finally:
            if self._view.is_superseded(plan):
                # Whatever still waits to be sent belongs to an epoch that nobody takes anything of.
                peers.abort()
            if stage is not None:
                stage.close()
            peers.close(_CLOSE_TIMEOUT_S)

    def _make_peers(self, plan: Plan) -> Peers:
        hello = Hello(
            cluster=self._spec.cluster,
            name=self._spec.name,
            incarnation=self._incarnation,
            epoch=plan.epoch,
            fingerprint=plan.model.layout.fingerprint,
        )
        return Peers(self._transport, hello, timeout_s=plan.timeout_s, on_failed=self._send_failed)

    def _find_role(self) -> _Role | None:
        """The newest plan that this worker has not served in, and its place there; None while there is no role."""
        if self._is_stopping:
            raise StoppedEarly
        plan = self._view.plan()
        if plan is None or (self._served_epoch is not None and plan.epoch <= self._served_epoch):
            return None
        if any(one.incarnation == self._incarnation for one in plan.fenced):
            raise DeclaredDead(f"this incarnation was declared dead before epoch {plan.epoch}: another has its place")
        self._follow()
        place = plan.place_of(self._spec.name)
        return _Role(plan, place) if place is not None or self._spec.name in plan.standby else None

    def _find_next_role(self) -> _Role | None:
        """As ``_find_role``; any role at all when this worker is to stop."""
        return _Role(self._plan, None) if self._is_stopping else self._find_role()

    def _acknowledge(self, pipeline: str, stage: int, value: bytes) -> None:
        self._keeper.update(self._keys.acks(pipeline, stage), value)

    def _send_failed(self, peer: str, reason: str, epoch: Epoch) -> None:
        self._mailbox.post(PeerLost(peer=peer, reason=reason, epoch=epoch))

    def _follow(self) -> None:
        """Whoever leads when the first plan is taken is this worker's controller, for good."""
        if self._leader is None and (leader := self._view.controller()) is not None:
            self._leader = leader.incarnation

    def _register(self, state: MemberState, place: Place | None = None, *, problem: str | None = None) -> None:
        self._follow()
        epoch = None if self._plan is None else self._plan.epoch
        member = self._registration.member(state, place=place, epoch=epoch, leader=self._leader, problem=problem)
        self._keeper.update(self._keys.worker(self._spec.name), encode_json(member))


def main(words: Sequence[str] = ()) -> int:
    """The worker's exit status: 0 when told to stop, 1 when it could not go on, 2 when its arguments are wrong."""
    try:
        spec = await_spec(words, os.environ, SystemClock()) if words else owned_spec(read_line())
        log = WorkerLog(spec.name)
        log.attach(logging.StreamHandler(sys.stderr))
        logging.getLogger().setLevel(spec.log_level)
        worker = WorkerProcess(spec, log)
    except DejavuError as error:
        sys.stderr.write(f"error: cannot start: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        # Also while it waits for its cluster, which may be minutes.
        return 130
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: worker.ask_to_stop())
    if words:
        worker.follow_leader()
    else:
        threading.Thread(target=_stop_at_end_of_input, args=(worker,), name="launcher-watch", daemon=True).start()
    try:
        worker.run()
    except DejavuError as error:
        logger.error("%s", error)
        return 1
    finally:
        worker.close()
    return 0


def _stop_at_end_of_input(worker: WorkerProcess) -> None:
    """The launcher holds the other end for as long as it lives."""
    # Not through sys.stdin: a thread that waits inside its lock would break the interpreter's exit.
    while line := read_line():
        worker.inject(line)
    worker.ask_to_stop()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    # Everything is closed; taking torch apart object by object would only keep the launcher waiting.
    os._exit(status)
