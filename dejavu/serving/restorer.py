"""A new epoch's first act: every open row gets its KV from where it is, or its prompt is run again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from dejavu.control.admission import Admission, Assigned
from dejavu.control.holdings import CopyAgain, HeldRow, RowProgress, RowRestore
from dejavu.control.journal import RestoreReceipt
from dejavu.control.recovery import copied_bytes, copies_again, restore_of, restored_bytes
from dejavu.control.ring import AdmittedRow
from dejavu.engine import messages as m
from dejavu.engine.payloads import decode_held
from dejavu.ids import RowId, WorkerName
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.tracking import Tracked

logger = logging.getLogger(__name__)

_HOLDINGS_TIMEOUT_S = 30.0


class Restorer:
    """For one epoch, on the controller's thread.

    Args:
        links: to the workers of the new epoch.
        rows: the open requests whose prompts were sent.
        steps: the last finished step of each token microbatch.
    """

    def __init__(
        self, links: ClusterLinks, admission: Admission, rows: Mapping[RowId, Tracked], steps: Mapping[int, int]
    ) -> None:
        self._links = links
        self._plan = links.plan
        self._admission = admission
        self._rows = rows
        self._steps = steps

    def run(self) -> RestoreReceipt:
        """Every open row is on its way: restored rows are admitted, the others' prompts are due.

        Raises NoAnswer when a worker does not answer, ClusterInterrupted when the epoch is over already.
        """
        holdings = self._holdings()
        unsent = self._admission.unsent
        sent = [row_id for row_id in self._admission.taken if row_id not in unsent]
        open_rows = [row for row_id in sent if (row := self._open(row_id)) is not None]
        restores = restore_of(self._plan, holdings, [self._progress(row) for row in open_rows])
        by_id = {restore.row_id: restore for restore in restores}
        copies = copies_again(self._plan, holdings, restores)
        for row in open_rows:
            self._rows[row.row_id].replayed = by_id[row.row_id].replayed
        self._release_strangers(holdings)
        self._send(restores, copies)
        self._run_again(open_rows, by_id)
        receipt = self._receipt(open_rows, by_id, copies)
        self._admit(open_rows, by_id, receipt.resume_steps)
        return receipt

    def _open(self, row_id: RowId) -> Assigned | None:
        return self._admission.assigned(row_id) if row_id in self._rows else None

    def _progress(self, row: Assigned) -> RowProgress:
        num_tokens = len(self._rows[row.row_id].tokens)
        return RowProgress(row_id=row.row_id, num_prompt=len(row.request.prompt_tokens), num_tokens=num_tokens)

    def _holdings(self) -> Mapping[WorkerName, Sequence[HeldRow]]:
        stages = (*self._plan.token_pipeline.stages, *self._plan.memory_stages)
        workers = [stage.worker for stage in stages]
        message = m.AskHoldings(epoch=self._plan.epoch)
        answers = self._links.ask(message, workers, m.Holdings, timeout_s=_HOLDINGS_TIMEOUT_S)
        holdings = {}
        for worker in workers:
            answer = answers[worker]
            holdings[worker] = decode_held(answer.inbound.payload)
            answer.inbound.release()
        return holdings

    def _release_strangers(self, holdings: Mapping[WorkerName, Sequence[HeldRow]]) -> None:
        """Rows that ended while nobody could be told are let go everywhere."""
        held = {row.row_id for rows in holdings.values() for row in rows}
        strangers = tuple(sorted(held - self._rows.keys()))
        if strangers:
            self._links.row_holders(m.ReleaseRows(epoch=self._plan.epoch, row_ids=strangers))

    def _send(self, restores: Sequence[RowRestore], copies: Sequence[CopyAgain]) -> None:
        replicas = [restore for restore in restores if restore.tier == "replica"]
        away = {(fetch.target, fetch.row_id) for restore in replicas for fetch in restore.fetches}
        for stage in self._plan.token_pipeline.stages:
            rows = tuple(self._restored(restore, (stage.worker, restore.row_id) not in away) for restore in replicas)
            again = tuple(m.CopySpan(one.row_id, one.start, one.stop) for one in copies if one.worker == stage.worker)
            if rows:
                message = m.RestoreRows(epoch=self._plan.epoch, rows=rows, copies=again)
                self._links.worker(stage.worker, message)
        parts: dict[WorkerName, list[m.SendPart]] = {}
        for restore in replicas:
            for fetch in restore.fetches:
                part = m.SendPart(fetch.row_id, fetch.layers, fetch.length, fetch.is_copy, fetch.target)
                parts.setdefault(fetch.source, []).append(part)
        for source, sent in parts.items():
            self._links.worker(source, m.SendRows(epoch=self._plan.epoch, parts=tuple(sent)))

    def _restored(self, restore: RowRestore, is_here: bool) -> m.RestoredRow:
        row = self._admission.assigned(restore.row_id)
        assert row is not None
        return m.RestoredRow(restore.row_id, row.slot.microbatch, row.slot.row_index, restore.length, is_here)

    def _run_again(self, rows: Sequence[Assigned], by_id: Mapping[RowId, RowRestore]) -> None:
        again = {row.row_id: self._rows[row.row_id].num_done for row in rows if by_id[row.row_id].tier != "replica"}
        known = self._rows.keys() | self._admission.unsent
        self._admission.interrupt(again, [row_id for row_id in self._admission.taken if row_id not in known])

    def _admit(self, rows: Sequence[Assigned], by_id: Mapping[RowId, RowRestore], steps: Mapping[int, int]) -> None:
        by_microbatch: dict[int, list[AdmittedRow]] = {index: [] for index in steps}
        for row in rows:
            if by_id[row.row_id].tier == "replica":
                depth = self._plan.token_pipeline.depth
                admitted = self._rows[row.row_id].admitted(row, ready_stages=depth)
                by_microbatch.setdefault(row.slot.microbatch, []).append(admitted)
        for microbatch, group in sorted(by_microbatch.items()):
            finished = {microbatch: steps.get(microbatch, 0)}
            self._links.token_first(m.AdmitRows(epoch=self._plan.epoch, rows=tuple(group), steps=finished))

    def _receipt(
        self, rows: Sequence[Assigned], by_id: Mapping[RowId, RowRestore], copies: Sequence[CopyAgain]
    ) -> RestoreReceipt:
        recomputed: dict[int, int] = {}
        for row in rows:
            microbatch = row.slot.microbatch
            recomputed[microbatch] = max(recomputed.get(microbatch, 0), by_id[row.row_id].replayed)
        now_s = self._links.clock.now()
        return RestoreReceipt(
            restored_s=now_s,
            resumed_s=now_s,
            rows=dict(Counter(by_id[row.row_id].tier for row in rows)),
            resume_steps={index: max(step - recomputed.get(index, 0), 0) for index, step in self._steps.items()},
            steps_recomputed=recomputed,
            bytes_restored=restored_bytes(self._plan, list(by_id.values())),
            bytes_replicated=copied_bytes(self._plan, copies),
        )
