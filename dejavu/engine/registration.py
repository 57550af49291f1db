"""What a worker says of itself in the store."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from dejavu.control.member import Member, MemberState
from dejavu.control.plan import Place
from dejavu.engine.worker_spec import WorkerSpec
from dejavu.ids import Epoch, IncarnationId


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What stays the same for as long as the process lives."""

    spec: WorkerSpec
    incarnation: IncarnationId
    address: str
    """``host:port`` of its listener."""

    def member(
        self,
        state: MemberState,
        *,
        place: Place | None = None,
        epoch: Epoch | None = None,
        leader: str | None = None,
        problem: str | None = None,
    ) -> Member:
        """The worker as it stands now, ``place`` and ``epoch`` being those of the plan that it serves."""
        return Member(
            name=self.spec.name,
            incarnation=self.incarnation,
            host=platform.node(),
            pid=os.getpid(),
            address=self.address,
            device=self.spec.device,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            state=state,
            pipeline=None if place is None else place.pipeline.kind,
            stage=None if place is None else place.stage.index,
            layers=None if place is None else place.stage.layers,
            epoch=None if place is None else epoch,
            leader=leader,
            problem=problem,
        )
