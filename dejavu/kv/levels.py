"""The optimisations of DéjàVuLib as one switch, each level adding one (DejaVu §4.1 and Fig. 11)."""

from __future__ import annotations

from enum import Enum


class StreamingLevel(Enum):
    """How KV leaves a stage."""

    off = "off"
    """It does not."""
    naive = "naive"
    """One transfer for each contiguous piece of the cache, awaited: the baseline."""
    buffered = "buffered"
    """What one pass has made in all layers is gathered into a reused buffer, one transfer, awaited."""
    layerwise = "layerwise"
    """A prompt's layer leaves while the next one computes; steps as before."""
    full = "full"
    """A step's cells leave while the next step computes, too."""

    @property
    def merges(self) -> bool:
        """Whether pieces share a transfer."""
        return self not in (StreamingLevel.off, StreamingLevel.naive)

    @property
    def prompts_in_background(self) -> bool:
        """Whether prompt layers leave beside the computation."""
        return self in (StreamingLevel.layerwise, StreamingLevel.full)

    @property
    def steps_in_background(self) -> bool:
        """Whether steps leave beside the computation."""
        return self is StreamingLevel.full
