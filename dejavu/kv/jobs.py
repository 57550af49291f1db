"""What a streamer has to send: a layer of a prompt pass, or rows of a pool. Nothing is copied before it is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import Tensor

from dejavu.ids import RowId
from dejavu.kv.chunk import StepMark
from dejavu.kv.device import Mark
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.route import RowSpan
from dejavu.kv.scatter import Region
from dejavu.kv.stream import RegionsByOwner, layer_regions, pool_regions
from dejavu.kv.stream_setup import PoolRow, StreamSetup

Pass: TypeAlias = Literal["prompt", "step"]
"""What made the cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerJob:
    """One layer of a prompt pass in tensors of its own, which nobody writes to afterwards."""

    layer: int
    keys_BHTD: Tensor
    values_BHTD: Tensor
    rows: tuple[RowSpan, ...]
    after: Mark
    made_by: Pass = "prompt"
    is_repeat: bool = False
    """It has left before, and its memory is another job's."""

    @property
    def row_ids(self) -> tuple[RowId, ...]:
        """Whose cells these are."""
        return tuple(span.row_id for span in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the job keeps alive."""
        return sum(
            {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in (self.keys_BHTD, self.values_BHTD)
            }.values()
        )

    def regions(self, setup: StreamSetup) -> RegionsByOwner:
        """The cells by owner."""
        return layer_regions(self.layer, self.keys_BHTD, self.values_BHTD, self.rows, setup)

    def reads(self, places: frozenset[int]) -> bool:
        """False: the tensors are the job's own."""
        return False

    def without(self, places: frozenset[int]) -> LayerJob:
        """The same job."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsJob:
    """Positions of rows in a pool. They are read when the job is sent; until then nobody may write to them."""

    pool: KvPool
    rows: tuple[PoolRow, ...]
    layers: LayerRange
    after: Mark
    made_by: Pass
    mark: StepMark | None = None
    """The step that made the cells, for whoever acknowledges it."""

    @property
    def row_ids(self) -> tuple[RowId, ...]:
        """Whose cells these are."""
        return tuple(row.span.row_id for row in self.rows)

    def regions(self, setup: StreamSetup) -> RegionsByOwner:
        """The cells by owner."""
        return pool_regions(self.pool, self.rows, setup, self.layers)

    def reads(self, places: frozenset[int]) -> bool:
        """Whether the job reads one of these rows of the pool."""
        return any(row.row_index in places for row in self.rows)

    def without(self, places: frozenset[int]) -> RowsJob:
        """The job for the other rows of the pool; it may be empty."""
        return replace(self, rows=tuple(row for row in self.rows if row.row_index not in places))


StreamJob: TypeAlias = LayerJob | RowsJob


def merged_regions(jobs: Iterable[StreamJob], setup: StreamSetup) -> RegionsByOwner:
    """The cells of several jobs by owner, in the order of the jobs."""
    by_owner: dict[str, list[Region]] = {}
    for job in jobs:
        for owner, regions in job.regions(setup).items():
            by_owner.setdefault(owner, []).extend(regions)
    return by_owner


def latest(jobs: Sequence[StreamJob]) -> Mark:
    """A point in the computation's order behind all that made the jobs' cells: jobs are in that order."""
    return jobs[-1].after
