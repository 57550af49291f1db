"""The paper's figures on real clusters of a tiny model: every level to memory and disk, files and counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dejavu.kv.levels import StreamingLevel
from dejavu.report.timeline import read_timeline
from dejavu.workflows.streaming import run

from harness.cluster_kit import configured

pytestmark = pytest.mark.slow

LAYERS, HEADS, ROWS = 4, 4, 2
SMALL = (
    "measurement.models=[tiny-opt]",
    "measurement.repeats=1",
    f"workload.num_requests={ROWS}",
    "workload.prompt_tokens=8",
    "workload.max_tokens=6",
)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.grid
@pytest.mark.usefixtures("nothing_left")
def test_fig11_measures_every_level_to_memory_and_disk_with_the_same_tokens(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output.mkdir()
    run(configured("experiment=fig11", *SMALL), output)
    assert (output / "table.csv").read_text().splitlines()[0] == (
        "model,destination,level,latency_s,slowdown,transfers_per_step,streaming_ms_per_step,exposed_ms_per_step"
    )
    table = {(row["destination"], row["level"]): row for row in read(output / "table.csv")}
    assert set(table) == {(to, level.value) for to in ("memory", "disk") for level in StreamingLevel}
    for to in ("memory", "disk"):
        transfers = {level: float(table[to, level]["transfers_per_step"]) for level in ("off", "naive", "buffered")}
        assert transfers == {"off": 0, "naive": 2 * LAYERS * HEADS * ROWS, "buffered": 1}
        assert float(table[to, "off"]["exposed_ms_per_step"]) == 0
        assert float(table[to, "naive"]["streaming_ms_per_step"]) > 0
        trace = read_timeline(output / f"timeline-tiny-opt-{to}.json")
        assert {"stream_out", "flush", "stream_wait", "prompt", "step"} <= {event.name for event in trace.traceEvents}
    assert {row["steps"] for row in read(output / "rounds.csv")} == {"5"}
    assert (output / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert not list(output.glob("clusters/*/kv"))
    assert str(output) in capsys.readouterr().out.replace("\n", "")


@pytest.mark.grid
@pytest.mark.usefixtures("nothing_left")
def test_fig27_measures_full_against_off_for_each_batch_size(output: Path) -> None:
    output.mkdir()
    run(configured("experiment=fig27", *SMALL, "measurement.batches=[1,2]", "measurement.destinations=[disk]"), output)
    table = read(output / "table.csv")
    assert list(table[0]) == ["model", "batch", "destination", "latency_off_s", "latency_full_s", "slowdown"]
    assert [(row["model"], row["batch"], row["destination"]) for row in table] == [
        ("tiny-opt", "1", "disk"),
        ("tiny-opt", "2", "disk"),
    ]
    assert len(read(output / "rounds.csv")) == 4
    assert (output / "figure.png").read_bytes().startswith(b"\x89PNG")
