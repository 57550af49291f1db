"""What moves between workers, and what that occupies."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dejavu.control.admission import Assigned
from dejavu.control.plan import Plan, Stage
from dejavu.ids import WorkerName
from dejavu.kv.layout import DTYPE_BYTES
from dejavu.kv.levels import StreamingLevel
from dejavu.sim.engine import Action, EventEngine
from dejavu.sim.machinery import Machinery
from dejavu.sim.station import Station

_AS_IT_COMES = (StreamingLevel.layerwise, StreamingLevel.full)
"""A prompt's layer leaves while the next one is computed; otherwise all of them leave at the end."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    source: WorkerName
    target: WorkerName
    num_bytes: int
    least_end_s: float
    """Its last bytes are made only then."""
    arrived: Action


class Links:
    """Each worker sends one transfer of KV at a time, in order, and receives one; of those who wait for one receiver,
    whoever has waited longest goes first. Activations do not wait for KV: they cost a hop and their bytes.

    Of one epoch: once it is over, nothing arrives any more.
    """

    def __init__(
        self, plan: Plan, machinery: Machinery, engine: EventEngine, stations: Mapping[WorkerName, Station]
    ) -> None:
        self.sent_bytes = 0
        self.is_over = False
        self._machinery = machinery
        self._bandwidth = machinery.link_bytes_per_s
        self._engine = engine
        self._stations = stations
        self._position_bytes = plan.model.layout.position_bytes
        self._hidden_bytes = plan.model.hidden_size * DTYPE_BYTES[plan.model.dtype]
        self._streams_as_it_comes = plan.streaming in _AS_IT_COMES
        self._waiting: dict[WorkerName, deque[_Transfer]] = {}
        """By sender; whoever has sent nothing for the longest time is first."""
        self._sending: set[WorkerName] = set()
        self._receiving: set[WorkerName] = set()

    def kv_bytes(self, num_layers: int, positions: int) -> int:
        """Of K and V of so many positions (over all rows) in so many layers."""
        return num_layers * positions * self._position_bytes

    def hop_s(self, positions: int) -> float:
        """Until the activations of so many positions have arrived at the next stage."""
        bandwidth = self._bandwidth
        return self._machinery.hop_s + (positions * self._hidden_bytes / bandwidth if bandwidth else 0.0)

    def send(
        self, source: WorkerName, target: WorkerName, num_bytes: int, arrived: Action, *, least_end_s: float = 0.0
    ) -> None:
        """``arrived`` is called when the bytes, of which the last are made at ``least_end_s``, are at the target."""
        self.sent_bytes += num_bytes
        if self._bandwidth is None or source == target:
            self._engine.at(least_end_s, lambda: self._arrive(arrived))
            return
        queue = self._waiting.setdefault(source, deque())
        queue.append(_Transfer(source, target, num_bytes, least_end_s, arrived))
        self._begin()

    def send_layers(
        self,
        source: WorkerName,
        target: WorkerName,
        layers: tuple[int, int],
        positions: int,
        start_s: float,
        layer_s: float,
        end_s: float,
        arrived: Action,
    ) -> None:
        """The KV of ``layers`` (a range of the source's own, from 0) is sent as the source computes them.

        It begins its first layer at ``start_s``, takes ``layer_s`` for each, and ends its pass at ``end_s``.
        """
        first, stop = layers
        num_bytes = self.kv_bytes(stop - first, positions)
        if not self._streams_as_it_comes or self._bandwidth is None:
            self._engine.at(end_s, lambda: self.send(source, target, num_bytes, arrived))
            return
        last_s = num_bytes / (stop - first) / self._bandwidth
        least_end_s = start_s + stop * layer_s + last_s
        self._engine.at(
            start_s + (first + 1) * layer_s,
            lambda: self.send(source, target, num_bytes, arrived, least_end_s=least_end_s),
        )

    def _begin(self) -> None:
        """Every transfer that can be under way is."""
        if self.is_over:
            return
        for source, queue in list(self._waiting.items()):
            if source in self._sending or queue[0].target in self._receiving:
                continue
            transfer = queue.popleft()
            del self._waiting[source]
            if queue:
                self._waiting[source] = queue
            self._run(transfer)

    def _run(self, transfer: _Transfer) -> None:
        assert self._bandwidth is not None
        source, target = transfer.source, transfer.target
        self._sending.add(source)
        self._receiving.add(target)
        seconds = transfer.num_bytes / self._bandwidth
        self._stations[source].times.sent_s += seconds

        def ended() -> None:
            self._sending.discard(source)
            self._receiving.discard(target)
            self._arrive(transfer.arrived)
            self._begin()

        self._engine.at(max(self._engine.now_s + seconds, transfer.least_end_s), ended)

    def _arrive(self, arrived: Action) -> None:
        if not self.is_over:
            arrived()


def overlap(source: Stage, target: Stage) -> tuple[int, int]:
    """Layers that both stages have, as a range of the source's own layers from 0; empty where they share none."""
    first = max(source.layers.start, target.layers.start) - source.layers.start
    stop = min(source.layers.stop, target.layers.stop) - source.layers.start
    return first, max(first, stop)


def positions_of(rows: Sequence[Assigned]) -> int:
    """Of all prompts, without padding."""
    return sum(row.length for row in rows)
