"""What surrounds the computation, whose own times come from the planner's cost model (``dejavu.planning.costs``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """Links, buses, and how long a repair takes."""

    streaming_overhead: float = 1.0
    """m: a prompt stage that streams its KV takes m times as long (DejaVu §4.2.1)."""
    link_bytes_per_s: float | None = None
    """Of each worker, out and in separately; None: KV is there at once."""
    pcie_bytes_per_s: float | None = None
    """From host memory to the device; None: swapping costs nothing."""
    is_swapping: bool = False
    """Each stage keeps the KV of two microbatches on its device and that of the others in host memory."""
    hop_s: float = 0.0
    """From the end of a pass on one stage until the next stage has it, beside the bytes."""
    detection_s: float = 0.1
    """From a death until it is known and the old epoch is over."""
    replacement_s: float = 2.0
    """From then until a new process serves in the dead worker's place."""
    standby_s: float = 0.1
    """The same where a standby takes the place, or the layers go to the survivors."""
