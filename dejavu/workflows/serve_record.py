"""What a service leaves behind of its requests, in bounded memory: lines on disk, and the newest for the report."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence

from dejavu.ids import RequestId
from dejavu.report.completions import CompletionWriter
from dejavu.report.counters import WorkerCounters
from dejavu.report.metrics import FINISHED_REASONS, Metrics, RequestCounts, Throughput, TokenCounts, summarize
from dejavu.report.progress import Progress
from dejavu.report.repairs import RepairReceipt
from dejavu.request import Completion
from dejavu.serving.tally import Counts

logger = logging.getLogger(__name__)

MOST_TOKENS = 100_000
"""Of the requests that are kept for latencies; some megabytes."""
_SHOW_INTERVAL_S = 0.5


class ServeRecord:
    """The controller's observer of a service.

    Args:
        writer: None: no lines are written.
    """

    def __init__(self, writer: CompletionWriter | None, progress: Progress) -> None:
        self._writer = writer
        self._progress = progress
        self._recent: deque[tuple[Completion, Sequence[float]]] = deque()
        self._num_recent_tokens = 0
        self._by_reason: dict[str, int] = {}
        self._num_tokens = 0
        self._num_open = 0
        self._shown_s = 0.0

    def token(self, request_id: RequestId, at_s: float) -> None:
        """One more token has come."""
        self._num_tokens += 1
        self._show(at_s)

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """The request's line is on disk, if the disk takes it; the newest ones are kept."""
        self._write(completion)
        reason = completion.finish_reason
        self._by_reason[reason] = self._by_reason.get(reason, 0) + 1
        self._recent.append((completion, token_times_s))
        self._num_recent_tokens += len(completion.tokens) + 1
        while self._num_recent_tokens > MOST_TOKENS and len(self._recent) > 1:
            gone, _ = self._recent.popleft()
            self._num_recent_tokens -= len(gone.tokens) + 1
        self._show(completion.end_s, is_due=True)

    def metrics(
        self, counts: Counts, workers: Mapping[str, WorkerCounters], wall_s: float, repairs: Sequence[RepairReceipt]
    ) -> Metrics:
        """The whole service in figures: all of its requests are counted, latencies are those of the newest."""
        completions = [completion for completion, _ in self._recent]
        times = {completion.id: times_s for completion, times_s in self._recent}
        metrics = summarize(completions, times, workers, wall_s, repairs)
        metrics["requests"] = RequestCounts(
            submitted=counts.submitted,
            finished=counts.finished,
            failed=counts.submitted - counts.finished,
            resumed=counts.resumed,
            by_reason=dict(
                sorted({**self._by_reason, **({"rejected": counts.rejected} if counts.rejected else {})}.items())
            ),
        )
        metrics["tokens"] = TokenCounts(prompt=counts.prompt_tokens, generated=counts.generated_tokens)
        metrics["throughput"] = Throughput(
            tokens_per_s=counts.generated_tokens / wall_s if wall_s > 0 else None,
            requests_per_s=counts.finished / wall_s if wall_s > 0 else None,
        )
        return metrics

    def _write(self, completion: Completion) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(completion)
        except OSError as error:
            # Its user has the answer, and the others must not lose theirs to a full disk.
            logger.error("completions.jsonl takes no more lines: %s", error)
            self._writer = None

    def _show(self, at_s: float, *, is_due: bool = False) -> None:
        # Not at every token: showing costs more than counting, and the cores are the workers'.
        if is_due or at_s - self._shown_s > _SHOW_INTERVAL_S:
            self._shown_s = at_s
            num_ended = sum(self._by_reason.values())
            num_failed = num_ended - sum(self._by_reason.get(reason, 0) for reason in FINISHED_REASONS)
            self._progress.requests(num_ended, num_ended, self._num_tokens, num_failed)
