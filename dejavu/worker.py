"""A worker process: ``python -m dejavu.worker``, its spec as one JSON line on standard input.

It registers, learns its role from the plan, builds its stage, links to its peers and serves until it is told to
stop or its launcher is gone. Heavy imports come after the registration, so that a slow start is seen as a start.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import uuid
from functools import partial
from pathlib import Path

from dejavu.clock import SystemClock
from dejavu.control.member import Member, MemberState, encode_json
from dejavu.control.plan import Place, Plan
from dejavu.engine.cluster_view import ClusterView
from dejavu.engine.mailbox import Mailbox, PeerLost, Wake
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.engine.worker_spec import WorkerSpec, decode_worker_spec
from dejavu.errors import DejavuError, Fatal
from dejavu.ids import IncarnationId, WorkerName
from dejavu.report.logs import WorkerLog
from dejavu.report.spans import SpanRecorder
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper
from dejavu.transport.base import Hello
from dejavu.transport.factory import make_transport

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 3.0


class WorkerProcess:
    """One incarnation of a worker, from registration to exit."""

    def __init__(self, spec: WorkerSpec, log: WorkerLog) -> None:
        self._spec = spec
        self._log = log
        self._keys = Keys(spec.cluster)
        self._incarnation = IncarnationId(uuid.uuid4().hex[:12])
        self._clock = SystemClock()
        self._plan: Plan | None = None
        self._is_stopping = False
        self._mailbox = Mailbox(
            cluster=spec.cluster,
            epoch=lambda: None if self._plan is None else self._plan.epoch,
            fingerprint=lambda: "" if self._plan is None else self._plan.model.layout.fingerprint,
        )
        self._transport = make_transport(spec.transport_kind, spec.secret, spec.transport_settings)
        self._address = self._transport.listen(self._mailbox, host=spec.host)
        self._keeper = LeaseKeeper(
            spec.store, spec.lease_ttl_s, {self._keys.worker(spec.name): encode_json(self._member("starting"))}
        )
        self._view = ClusterView(spec.store, self._keys)

    def run(self) -> None:
        """The worker has served and been told to stop. Raises DejavuError when it cannot go on."""
        try:
            self._serve()
        except DejavuError as error:
            self._register("draining", problem=str(error))
            raise

    def close(self) -> None:
        """Lease, links, threads and port are gone."""
        self._view.close()
        logger.debug("the watch has ended")
        self._keeper.close()
        logger.debug("the lease is given back")
        self._transport.close(_CLOSE_TIMEOUT_S)
        logger.info("ended")

    def ask_to_stop(self) -> None:
        """The main thread will end as soon as it looks up. Safe in a signal handler."""
        self._is_stopping = True
        self._mailbox.post(Wake())

    def _serve(self) -> None:
        plan, place = self._view.wait_for(self._find_place, "a plan for this worker", self._spec.start_timeout_s)
        self._plan = plan
        self._log.set_epoch(plan.epoch)
        logger.info("%s stage %d of epoch %d", place.pipeline.kind, place.stage.index, plan.epoch)
        recorder = SpanRecorder(self._clock)
        from dejavu.engine.build import build_stage, load_stage  # torch and transformers: seconds

        loaded = load_stage(plan, place, recorder)
        self._register("ready", place)
        peers = self._connect(plan)
        stage = build_stage(
            name=self._spec.name,
            cluster=self._spec.cluster,
            plan=plan,
            place=place,
            loaded=loaded,
            mailbox=self._mailbox,
            peers=peers,
            recorder=recorder,
            clock=self._clock,
            is_asked_to_stop=lambda: self._is_stopping,
            kv_folder=None if self._spec.kv_folder is None else Path(self._spec.kv_folder),
        )
        try:
            self._register("serving", place)
            stage.engine.run()
        finally:
            stage.close()
            peers.close(_CLOSE_TIMEOUT_S)

    def _connect(self, plan: Plan) -> Peers:
        hello = Hello(
            cluster=self._spec.cluster,
            name=self._spec.name,
            incarnation=self._incarnation,
            epoch=plan.epoch,
            fingerprint=plan.model.layout.fingerprint,
        )
        peers = Peers(self._transport, hello, timeout_s=plan.timeout_s, on_failed=self._send_failed)
        for name in plan.peers_of(self._spec.name):
            ready = partial(self._ready_address, name)
            address = self._view.wait_for(ready, f"worker {name}", self._spec.start_timeout_s)
            peers.connect(name, address, timeout_s=plan.timeout_s)
        controller = self._view.wait_for(self._view.controller, "the controller", self._spec.start_timeout_s)
        peers.connect(CONTROLLER, controller.address, timeout_s=plan.timeout_s)
        return peers

    def _find_place(self) -> tuple[Plan, Place] | None:
        self._check_stop()
        plan = self._view.plan()
        place = None if plan is None else plan.place_of(self._spec.name)
        return None if plan is None or place is None else (plan, place)

    def _ready_address(self, name: WorkerName) -> str | None:
        self._check_stop()
        member = self._view.member(name)
        return member.address if member is not None and member.state in ("ready", "serving") else None

    def _check_stop(self) -> None:
        if self._is_stopping:
            raise Fatal("asked to stop before serving")

    def _send_failed(self, peer: str, reason: str) -> None:
        self._mailbox.post(PeerLost(peer=peer, reason=reason))

    def _register(self, state: MemberState, place: Place | None = None, *, problem: str | None = None) -> None:
        self._keeper.update(self._keys.worker(self._spec.name), encode_json(self._member(state, place, problem)))

    def _member(self, state: MemberState, place: Place | None = None, problem: str | None = None) -> Member:
        return Member(
            name=self._spec.name,
            incarnation=self._incarnation,
            host=platform.node(),
            pid=os.getpid(),
            address=self._address,
            device=self._spec.device,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            state=state,
            pipeline=None if place is None else place.pipeline.kind,
            stage=None if place is None else place.stage.index,
            layers=None if place is None else place.stage.layers,
            problem=problem,
        )


def main() -> int:
    """The worker's exit status: 0 when told to stop, 1 when it could not go on."""
    line = _read_line()
    if not line:
        sys.stderr.write("a worker reads its spec as one JSON line on standard input; there was none\n")
        return 1
    spec = decode_worker_spec(line)
    log = WorkerLog(spec.name)
    log.attach(logging.StreamHandler(sys.stderr))
    logging.getLogger().setLevel(spec.log_level)
    try:
        worker = WorkerProcess(spec, log)
    except DejavuError as error:
        logger.error("cannot start: %s", error)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: worker.ask_to_stop())
    threading.Thread(target=_stop_at_end_of_input, args=(worker,), name="launcher-watch", daemon=True).start()
    try:
        worker.run()
    except DejavuError as error:
        logger.error("%s", error)
        return 1
    finally:
        worker.close()
    return 0


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            break
        line += more
    return line


def _stop_at_end_of_input(worker: WorkerProcess) -> None:
    """The launcher holds the other end for as long as it lives."""
    # Not through sys.stdin: a thread that waits inside its lock would break the interpreter's exit.
    while os.read(0, 4096):
        pass
    worker.ask_to_stop()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # Everything is closed; taking torch apart object by object would only keep the launcher waiting.
    os._exit(status)
