"""What streaming cost, out of spans; its rows and medians; its figure."""

from __future__ import annotations

import csv
import io
import struct
from pathlib import Path

import pytest
from rich.console import Console

from dejavu.report.figure_style import Caption
from dejavu.report.figures import draw_batches, draw_levels
from dejavu.report.machine import machine, processor
from dejavu.report.spans import Category, Span
from dejavu.report.streaming_table import (
    BatchRow,
    RoundsFile,
    as_text,
    by_batch,
    by_level,
    summarise,
    write_table,
)
from dejavu.report.streaming_times import StreamingTimes, times_of

LEVELS = ("off", "naive", "buffered", "layerwise", "full")
CAPTION = Caption(title="Title", subtitle="sizes", source="machine")


def span(name: str, start_s: float, duration_s: float, of: str, **args: int) -> Span:
    category: Category = "wait" if name == "stream_wait" else "stream"
    return Span(name, category, start_s, duration_s, {"of": of, **args})


def step(start_s: float) -> Span:
    return Span("step", "compute", start_s, 0.01)


def row(level: str, latency_s: float, *, round_index: int = 0, batch: int = 4, **names: str) -> BatchRow:
    return BatchRow(
        model=names.get("model", "m"),
        destination=names.get("destination", "memory"),
        batch=batch,
        round_index=round_index,
        turn=0,
        level=level,
        latency_s=latency_s,
        times=StreamingTimes(steps=2, step_transfers=2 * len(level), step_streaming_s=0.004, prompt_exposed_s=0.001),
    )


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_times_of_a_batch_are_those_of_the_spans_that_begin_in_its_window() -> None:
    spans = [
        span("stream_out", 9.9, 5.0, "step", transfers=7, bytes=70),
        step(9.9),
        span("stream_out", 10.0, 0.3, "prompt", transfers=2, bytes=100),
        span("flush", 10.3, 0.1, "prompt", bytes=100),
        span("stream_wait", 10.0, 0.25, "prompt"),
        step(11.0),
        step(12.0),
        span("stream_out", 11.1, 0.02, "step", transfers=3, bytes=10),
        span("stream_out", 12.1, 0.02, "step", transfers=1, bytes=10),
        span("flush", 12.2, 0.06, "step", bytes=10),
        span("stream_wait", 12.1, 0.05, "step"),
        span("stream_out", 13.0, 5.0, "step", transfers=9, bytes=90),
    ]
    times = times_of(spans, 10.0, 13.0)
    assert (times.steps, times.step_transfers, times.prompt_transfers, times.streamed_bytes) == (2, 4, 2, 120)
    assert times.transfers_per_step == 2
    assert times.streaming_ms_per_step == pytest.approx(50)
    assert times.exposed_ms_per_step == pytest.approx(150)
    assert times.step_exposed_ms_per_step == pytest.approx(25)
    assert times.prompt_streaming_s == pytest.approx(0.4)
    assert times.prompt_exposed_s == pytest.approx(0.25)


def test_times_without_a_step_are_those_of_the_whole_batch() -> None:
    times = times_of([span("stream_wait", 1.0, 0.5, "prompt")], 0.0, 2.0)
    assert times.exposed_ms_per_step == pytest.approx(500)
    assert times_of([], 0.0, 1.0) == StreamingTimes()


def test_slowdown_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_the_medians() -> None:
    rows = [
        *(row("off", latency_s, round_index=index) for index, latency_s in enumerate((10.0, 20.0, 40.0))),
        *(row("full", latency_s, round_index=index) for index, latency_s in enumerate((11.0, 30.0, 42.0))),
    ]
    off, full = summarise(rows)
    assert (off.slowdown, off.latency_s) == (1.0, 20.0)
    assert full.slowdowns == (1.1, 1.5, 1.05)
    assert full.slowdown == pytest.approx(1.1)
    assert full.latency_s == 30.0


def test_a_round_without_off_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"round 1 of .* has no level off to compare full with"):
        summarise([row("off", 1.0), row("full", 1.0), row("full", 1.0, round_index=1)])


def test_the_table_by_level_has_exactly_the_promised_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv", by_level(summarise([row("off", 3.0), row("naive", 7.5)])))
    heading = (tmp_path / "table.csv").read_text().splitlines()[0]
    assert heading == (
        "model,destination,level,latency_s,slowdown,transfers_per_step,streaming_ms_per_step,exposed_ms_per_step"
    )
    naive = read(tmp_path / "table.csv")[1]
    assert (naive["level"], naive["latency_s"], naive["slowdown"]) == ("naive", "7.5", "2.5")
    assert (naive["transfers_per_step"], naive["streaming_ms_per_step"], naive["exposed_ms_per_step"]) == (
        "5",
        "2",
        "0.5",
    )


def test_the_table_by_batch_has_exactly_the_promised_columns(tmp_path: Path) -> None:
    rows = [row(level, 2.0 + (level == "full"), batch=batch) for batch in (1, 4) for level in ("off", "full")]
    write_table(tmp_path / "table.csv", by_batch(summarise(rows)))
    heading = (tmp_path / "table.csv").read_text().splitlines()[0]
    assert heading == "model,batch,destination,latency_off_s,latency_full_s,slowdown"
    assert [line["batch"] for line in read(tmp_path / "table.csv")] == ["1", "4"]
    assert read(tmp_path / "table.csv")[0]["slowdown"] == "1.5"


def test_a_batch_is_in_the_rounds_file_before_the_next_one_comes(tmp_path: Path) -> None:
    with RoundsFile(tmp_path / "rounds.csv") as rounds:
        rounds.write(row("off", 1.25))
        (first,) = read(tmp_path / "rounds.csv")
        rounds.write(row("full", 1.5, round_index=1))
    assert (first["level"], first["latency_s"], first["prompt_exposed_ms"]) == ("off", "1.25", "1")
    assert [line["round"] for line in read(tmp_path / "rounds.csv")] == ["0", "1"]


def test_the_terminal_shows_every_row_in_eighty_columns_a_number_in_four_digits() -> None:
    file = io.StringIO()
    rows = [row("off", 2.0, model="random-gpt2-124m"), row("layerwise", 2.0345678, model="random-gpt2-124m")]
    Console(file=file, width=80).print(as_text(by_level(summarise(rows))))
    text = file.getvalue()
    assert all(word in text for word in ("random-gpt2-124m", "layerwise", "2.035", "transfers", "streaming", "exposed"))
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("naive_s", [1.5, 80.0])
def test_the_figure_of_levels_is_a_png_of_a_readable_size_on_either_scale(tmp_path: Path, naive_s: float) -> None:
    rows = [
        row(level, naive_s if level == "naive" else 1.0 + index / 100, model=model, destination=destination)
        for model in ("one", "two")
        for destination in ("memory", "disk")
        for index, level in enumerate(LEVELS)
    ]
    draw_levels(tmp_path / "figure.png", summarise(rows), CAPTION)
    width, height = png_size(tmp_path / "figure.png")
    assert 1000 < width < 3000
    assert 500 < height < 1500
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_the_figure_of_batches_takes_gains_and_missing_places(tmp_path: Path) -> None:
    rows = [
        row(level, 1.0 - 0.01 * (level == "full"), batch=batch, model=model)
        for model, batches in (("one", (1, 4)), ("two", (1,)))
        for batch in batches
        for level in ("off", "full")
    ]
    draw_batches(tmp_path / "figure.png", summarise(rows), CAPTION)
    assert png_size(tmp_path / "figure.png")[0] > 1000


def test_the_machine_is_named_by_its_processor_and_never_by_its_host(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert processor(cpuinfo) == "Some CPU @ 2 GHz"
    assert processor(tmp_path / "absent")
    assert " core" in machine()
