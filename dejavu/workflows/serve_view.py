"""What an operator sees of a service: its meters, its latencies, and the view that joins them with the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from dejavu.clock import Clock
from dejavu.serving.latencies import Latencies
from dejavu.serving.meters import LiveMeters
from dejavu.serving.service import Service
from dejavu.serving.view import ClusterView
from dejavu.workflows.running import RunningCluster


@dataclass(frozen=True, slots=True)
class Instruments:
    """What the controller feeds."""

    meters: LiveMeters = field(default_factory=LiveMeters)
    latencies: Latencies = field(default_factory=Latencies)

    def view(self, cluster: RunningCluster, service: Service, *, name: str, model: str, clock: Clock) -> ClusterView:
        """The served cluster of that name, whose clients call the model so."""
        return ClusterView(
            cluster=name,
            model=model,
            clock=clock,
            service=service,
            meters=self.meters,
            latencies=self.latencies,
            members=cluster.members,
            journals=cluster.journals,
        )
