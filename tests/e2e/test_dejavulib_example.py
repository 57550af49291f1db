"""The library by itself: the script that the document shows does what the document says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dejavu.kv.disk_index import stored_rows

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_moves_a_cache_over_ucx_and_disk_between_unequal_pipelines(
    tmp_path: Path, nothing_left: None
) -> None:
    command = [sys.executable, str(ROOT / "tools/example_dejavulib.py"), "--folder", str(tmp_path / "kv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    over_ucx, over_disk, verdict = done.stdout.splitlines()
    assert over_ucx.endswith(": 36 messages, 72 chunks, 16171008 bytes")
    assert over_disk.endswith(": 36 messages, 72 chunks, 16171008 bytes")
    assert verdict == "every cell is equal"
    assert stored_rows(tmp_path / "kv" / "token1") == tuple(range(6))


@pytest.mark.grid
@pytest.mark.slow
def test_the_microbenchmark_prints_a_table_for_each_medium(tmp_path: Path, nothing_left: None) -> None:
    options = ["--folder", str(tmp_path), "--rounds", "1", "--sample-mb", "0.25", "--chunk-kb", "4", "64"]
    command = [sys.executable, str(ROOT / "tools/bench_primitives.py"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if line and not line.startswith("|")]
    assert [title.split(",")[0] for title in titles] == ["local", "remote", "disk", "steps before a flush"]
    assert list(tmp_path.iterdir()) == []
