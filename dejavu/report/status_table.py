"""How a cluster stands, as a person reads it: conditions, stages with their workers, repairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dejavu.report.amounts import UNKNOWN, printable, show_count, show_seconds
from dejavu.report.cluster_status import ABSENT, DEAD, JOINING, ClusterStatus, StageStatus, WorkerStatus
from dejavu.report.repairs import repair_line

_STATE_STYLES = {
    "serving": "green",
    ABSENT: "bold red",
    DEAD: "bold red",
    JOINING: "yellow",
    "draining": "yellow",
    "starting": "yellow",
}
_GOOD = {"Ready": True, "Degraded": False, "Repairing": False}


def render_status(console: Console, status: ClusterStatus, *, now_s: float) -> None:
    """The status is on ``console``; ``now_s`` is wall-clock time, from which ages are told."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True, style="dim")
    lines.add_column(overflow="fold")
    for label, text in _head(status, now_s):
        lines.add_row(label, text)
    console.print(lines)
    if status.pipelines or status.standby or status.others:
        console.print()
        console.print(_workers(status))
    foot = Table.grid(padding=(0, 2))
    foot.add_column(no_wrap=True, style="dim")
    foot.add_column(overflow="fold")
    for label, text in _foot(status):
        foot.add_row(label, text)
    if foot.row_count:
        console.print()
        console.print(foot)


def _head(status: ClusterStatus, now_s: float) -> Iterator[tuple[str, Text]]:
    epoch = "no plan yet" if status.epoch is None else f"epoch {status.epoch}, {status.mode}"
    copies = f", replication {status.replication}" if status.replication else ""
    fenced = f", {show_count(status.num_fenced, 'incarnation')} declared dead" if status.num_fenced else ""
    yield "cluster", Text(status.cluster, style="bold").append(f": {epoch}{copies}{fenced}", "not bold")
    if status.model is not None:
        yield "model", Text(printable(status.model))
    controller = status.controller
    if controller is None:
        yield "controller", Text("none; whoever led has ended", style="bold red")
    else:
        where = f"{controller.host}, process {controller.pid}, {controller.address}"
        yield "controller", Text(printable(where))
    for name, condition in status.conditions.items():
        is_good = _GOOD.get(name) in (None, condition.status)
        told = f"{'yes' if condition.status else 'no'}: {condition.reason}"
        age = f" (for {show_seconds(max(0.0, now_s - condition.since_s))})"
        yield name, Text(printable(told), style="green" if is_good else "bold red").append(age, "not bold dim")


def _workers(status: ClusterStatus) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("place", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("worker", style="cyan", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("process", justify="right", no_wrap=True)
    table.add_column("address", no_wrap=True)
    table.add_column("copied", overflow="fold")
    for pipeline in status.pipelines:
        for stage in pipeline.stages:
            place = (f"{pipeline.kind} {stage.stage}", _layers(stage.layers))
            table.add_row(*place, *_worker_cells(stage.worker), _copied(stage))
    for kind, workers in (("standby", status.standby), ("no place", status.others)):
        for worker in workers:
            table.add_row(kind, "", *_worker_cells(worker), "")
    return table


def _layers(layers: Sequence[int]) -> str:
    start, stop = layers
    return f"{start}–{stop - 1}" if stop - start > 1 else str(start)


def _worker_cells(worker: WorkerStatus) -> tuple[str | Text, ...]:
    return (
        worker.name,
        Text(worker.state, style=_STATE_STYLES.get(worker.state, "")),
        UNKNOWN if worker.epoch is None else str(worker.epoch),
        UNKNOWN if worker.pid is None else str(worker.pid),
        UNKNOWN if worker.address is None else printable(worker.address),
    )


def _copied(stage: StageStatus) -> str:
    """``0:17 1:16``: the last copied step of each microbatch."""
    return " ".join(f"{microbatch}:{step}" for microbatch, step in stage.copied.items())


def _foot(status: ClusterStatus) -> Iterator[tuple[str, Text]]:
    workers = [stage.worker for pipeline in status.pipelines for stage in pipeline.stages]
    for worker in (*workers, *status.standby, *status.others):
        if worker.problem is not None:
            yield worker.name, Text(printable(worker.problem), style="bold red")
    for receipt in status.repairs:
        style = "bold red" if receipt["problem"] else "yellow"
        yield f"repair {receipt['number']}", Text(printable(repair_line(receipt)), style=style)
    for change in status.changes:
        where = "" if change.epoch is None else f", epoch {change.epoch}"
        why = "" if change.reason is None else f": {change.reason}"
        style = "bold red" if change.phase in ("refused", "failed") else "yellow"
        yield f"change {change.revision}", Text(printable(f"{change.what}: {change.phase}{where}{why}"), style=style)
    for key, reason in status.unreadable.items():
        yield key, Text(printable(f"cannot be read: {reason}"), style="bold red")
