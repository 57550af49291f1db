"""completions.jsonl: what was ended is on disk, whatever happens next."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dejavu.errors import DejavuError
from dejavu.ids import RequestId
from dejavu.report.completions import CompletionWriter, read_completions
from dejavu.request import Completion


def completion(name: str, text: str = "yes") -> Completion:
    return Completion(
        id=RequestId(name),
        prompt_tokens=3,
        tokens=(5, 6),
        text=text,
        finish_reason="stop",
        arrival_s=0.0,
        first_token_s=0.5,
        end_s=1.0,
    )


def test_completion_written_is_readable_before_the_writer_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    with CompletionWriter(path) as writer:
        writer.write(completion("a", "line\nend and 法国"))
        assert read_completions(path) == [completion("a", "line\nend and 法国")]
        assert writer.num_written == 1


def test_completion_of_a_writer_killed_afterwards_is_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from dejavu.report.completions import CompletionWriter; from dejavu.request import Completion\n"
        "CompletionWriter(Path(sys.argv[1])).write(Completion(id='a', prompt_tokens=3, tokens=(5, 6), text='yes',"
        " finish_reason='stop', arrival_s=0.0, first_token_s=0.5, end_s=1.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert read_completions(path) == [completion("a")]


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    with CompletionWriter(path) as writer:

        def write(thread: int) -> None:
            for number in range(50):
                writer.write(completion(f"{thread}-{number}", "long " * 300))

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {one.id for one in read_completions(path)} == {f"{t}-{n}" for t in range(4) for n in range(50)}


def test_torn_last_line_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "completions.jsonl"
    with CompletionWriter(path) as writer:
        writer.write(completion("a"))
        writer.write(completion("b"))
    os.truncate(path, path.stat().st_size - 10)
    with caplog.at_level(logging.WARNING):
        assert [one.id for one in read_completions(path)] == ["a"]
    assert f"{path}:2" in caplog.text


def test_writer_appends_after_whole_lines_and_drops_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    with CompletionWriter(path) as writer:
        writer.write(completion("a"))
    with path.open("ab") as file:
        file.write(b'{"id": "torn')
    with CompletionWriter(path) as writer:
        writer.write(completion("b"))
    assert [one.id for one in read_completions(path)] == ["a", "b"]


def test_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    with CompletionWriter(path) as writer:
        writer.write(completion("a"))
    path.write_bytes(b'{"id": 7}\n' + path.read_bytes())
    with pytest.raises(DejavuError, match=r"completions\.jsonl:1 is no completion"):
        read_completions(path)


def test_file_without_requests_is_there_and_empty(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    CompletionWriter(path).close()
    assert read_completions(path) == []


def test_closed_writer_refuses_a_late_completion(tmp_path: Path) -> None:
    writer = CompletionWriter(tmp_path / "completions.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="came too late"):
        writer.write(completion("a"))
