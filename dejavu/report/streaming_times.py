"""What streaming cost within one batch, from the spans of its workers: how many transfers, how long, how much exposed.

*Streaming* is the time of gathering, sealing and handing over plus the time until it was sent; *exposed* is the part
for which a computing thread stood still. What is streamed beside the computation is not exposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dejavu.report.spans import Span

_STREAMING = ("stream_out", "flush")
_EXPOSED = "stream_wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingTimes:
    """One batch. A step is one token of every row that goes on; the prompts are one pass before the first step."""

    steps: int = 0
    step_transfers: int = 0
    step_streaming_s: float = 0.0
    step_exposed_s: float = 0.0
    prompt_transfers: int = 0
    prompt_streaming_s: float = 0.0
    prompt_exposed_s: float = 0.0
    streamed_bytes: int = 0

    @property
    def transfers_per_step(self) -> float:
        """Messages that a step became."""
        return self.step_transfers / self._divisor

    @property
    def streaming_ms_per_step(self) -> float:
        """Milliseconds of streaming a step, hidden or not; those of the prompts are not in it."""
        return self.step_streaming_s * 1e3 / self._divisor

    @property
    def exposed_ms_per_step(self) -> float:
        """Milliseconds that computing stood still for streaming in the whole batch, prompts included, over its steps.

        The prompts are in it because layer-by-layer streaming hides nothing else.
        """
        return (self.step_exposed_s + self.prompt_exposed_s) * 1e3 / self._divisor

    @property
    def step_exposed_ms_per_step(self) -> float:
        """The same without the prompts."""
        return self.step_exposed_s * 1e3 / self._divisor

    @property
    def _divisor(self) -> int:
        """A batch of prompts alone has no step: its figures are then those of the whole batch."""
        return self.steps or 1


def times_of(spans: Iterable[Span], start_s: float, end_s: float) -> StreamingTimes:
    """The times of the batch that ran in [start_s, end_s) of the spans' clock. A span counts by its start.

    ``spans`` may be of several stages: their times are summed, and so are their steps.
    """
    own = [span for span in spans if start_s <= span.start_s < end_s]
    step = [span for span in own if span.args.get("of") == "step"]
    prompt = [span for span in own if span.args.get("of") == "prompt"]
    return StreamingTimes(
        steps=sum(span.category == "compute" and span.name == "step" for span in own),
        step_transfers=_transfers(step),
        step_streaming_s=_seconds(step, *_STREAMING),
        step_exposed_s=_seconds(step, _EXPOSED),
        prompt_transfers=_transfers(prompt),
        prompt_streaming_s=_seconds(prompt, *_STREAMING),
        prompt_exposed_s=_seconds(prompt, _EXPOSED),
        streamed_bytes=sum(int(span.args.get("bytes", 0)) for span in step + prompt if span.name == "stream_out"),
    )


def _seconds(spans: Iterable[Span], *names: str) -> float:
    return sum(span.duration_s for span in spans if span.name in names)


def _transfers(spans: Iterable[Span]) -> int:
    return sum(int(span.args.get("transfers", 0)) for span in spans if span.name == "stream_out")
