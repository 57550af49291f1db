"""A memory stage at work: it computes nothing and holds copies of the other stages' rows."""

from __future__ import annotations

import logging
from typing import assert_never

from dejavu.engine import messages as m
from dejavu.engine.compute import buffer_of
from dejavu.engine.fetching import FetchAgain
from dejavu.engine.host import Host
from dejavu.engine.lost import LostLinks
from dejavu.engine.mailbox import (
    ChunksSpoilt,
    ClusterFenced,
    ClusterFormed,
    Event,
    PeerLost,
    Received,
    RowsLanded,
    RowsSpoilt,
    Wake,
)
from dejavu.engine.peers import CONTROLLER
from dejavu.engine.sources import Sources
from dejavu.errors import Fatal, InvalidTransition
from dejavu.transport.base import Buffer

logger = logging.getLogger(__name__)

_IDLE_S = 0.5


class MemoryEngine:
    """The main thread of a memory stage in one epoch, until ``Stop`` or a newer plan. Copies land beside it."""

    def __init__(self, host: Host, sources: Sources) -> None:
        self._host = host
        self._sources = sources
        self._replicas = host.kept.replicas
        self._fetching = FetchAgain(host.peers, host.plan.epoch)
        self._lost = LostLinks(host)
        self._is_stopped = False

    def run(self) -> None:
        """The controller has said ``Stop``, or a newer plan is in force. Raises Fatal when the controller is gone."""
        while not self._is_stopped:
            event = self._host.mailbox.take(_IDLE_S)
            if event is not None:
                self._handle(event)
            self._lost.check()

    def finish(self) -> dict[str, int]:
        """What was counted in this epoch alone: the copies count for themselves."""
        return {"asked_again": self._fetching.num_asked}

    def _handle(self, event: Event) -> None:
        match event:
            case Received():
                try:
                    self._obey(event.message)
                finally:
                    event.inbound.release()
            case ChunksSpoilt():
                wanted = [chunk for chunk in event.chunks if not self._replicas.has_ended(chunk.row_id)]
                for row_id in self._fetching.ask(event.peer, wanted):
                    logger.error("the copy of row %s stays incomplete: its KV came corrupt too often", row_id)
            case PeerLost():
                self._lost.note(event)
            case Wake():
                self._is_stopped = self._host.is_asked_to_stop() or self._host.is_superseded()
            case RowsLanded() | RowsSpoilt():
                pass
            case ClusterFenced() | ClusterFormed():
                raise Fatal(f"{type(event).__name__} is for the controller")
            case _:
                assert_never(event)

    def _obey(self, message: m.AnyMessage) -> None:
        match message:
            case m.ReleaseRows():
                self._replicas.release(message.row_ids)
                self._fetching.forget(message.row_ids)
            case m.InspectCopy():
                self._inspect(message)
            case m.AskReport():
                self._host.report(None, self._replicas.counts() | self.finish())
            case m.AskMeters():
                self._host.tell_meters(None, self._replicas.counts() | self.finish())
            case m.AskHoldings():
                self._sources.tell()
            case m.SendRows():
                self._sources.send(message.parts)
            case m.ForgetSources():
                self._host.kept.forget_sources()
            case m.SetStreaming():
                pass
            case m.Stop():
                logger.info("stopping: %s", message.reason)
                self._is_stopped = True
            case _:
                raise Fatal(f"{type(message).__name__} is not for a memory stage")

    def _inspect(self, message: m.InspectCopy) -> None:
        length = self._replicas.length(message.row_id)
        payload: tuple[Buffer, ...] = ()
        if message.length <= length:
            try:
                landed = self._replicas.landed(message.row_id, self._host.place.stage.layers, message.length)
                payload = (buffer_of(landed.cells_LCHTD),)
            except InvalidTransition as error:
                logger.info("%s", error)
        answer = m.InspectedCopy(epoch=self._host.plan.epoch, row_id=message.row_id, length=length)
        self._host.tell(CONTROLLER, answer, payload)
