"""The command as a process: exit codes, what reaches the terminal, what the log keeps, how it stops."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# Stands in for the workflow, so that only the command is tested.
PROGRAM = """
import os, sys, types
from dejavu.errors import ConfigError, Fatal, InfeasibleError

def run(config, output):
    (output / "path").write_text(str(config.model.path))
    kind = os.environ["BEHAVIOUR"]
    if kind == "wrong":
        raise ConfigError("model.path: no weights")
    if kind == "infeasible" or (kind == "second" and config.strategy.split.prompt == 2):
        raise InfeasibleError("needs 10 GB, has 5")
    if kind == "failed":
        raise Fatal("worker w0 ended with status 9")
    if kind == "unexpected":
        raise ZeroDivisionError("boom")
    if kind == "wait":
        try:
            sys.stdout.write("ready\\n"); sys.stdout.flush()
            sys.stdin.read()
        finally:
            sys.stdout.write("cleaning\\n"); sys.stdout.flush()
            sys.stdin.read()
            sys.stdout.write("clean\\n"); sys.stdout.flush()

workflow = types.ModuleType("dejavu.workflows.generate")
workflow.run = run
sys.modules["dejavu.workflows.generate"] = workflow
from dejavu.run import main
main()
"""


def start(directory: Path, behaviour: str, *argv: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BEHAVIOUR": behaviour}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *argv],
        cwd=directory,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(directory: Path, behaviour: str, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. Nothing of a failure is a traceback."""
    process = start(directory, behaviour, *argv)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in out + err
    return process.returncode, out, err


def run_logs(directory: Path) -> list[Path]:
    return sorted(directory.rglob("run.log"))


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        ("fine", 0, ""),
        ("wrong", 2, "model.path: no weights"),
        ("infeasible", 3, "needs 10 GB"),
        ("failed", 1, "worker w0"),
        ("unexpected", 1, "ZeroDivisionError: boom"),
    ],
)
def test_how_a_workflow_ends_decides_the_exit_code(tmp_path: Path, behaviour: str, code: int, words: str) -> None:
    returned, out, err = finish(tmp_path, behaviour, "model=tiny-llama")
    assert returned == code
    assert out == ""
    assert words in err
    assert len(err.splitlines()) <= 3
    (log,) = run_logs(tmp_path)
    assert ("Traceback" in log.read_text()) == (code != 0)
    assert (log.parent / ".hydra" / "config.yaml").is_file()
    if code == 1:
        assert str(log) in err


def test_a_wrong_declaration_ends_with_2_before_anything_is_made(tmp_path: Path) -> None:
    code, out, err = finish(tmp_path, "fine", "cluster.num_worker=3")
    assert code == 2
    assert out == ""
    assert "'cluster.num_workers'" in err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_runs_every_job_names_the_failed_ones_at_the_end_and_ends_with_the_worst_code(tmp_path: Path) -> None:
    code, out, err = finish(
        tmp_path, "second", "-m", "strategy.split.prompt=1,2,0,3", "hydra.sweep.dir=out", "workload=synthetic"
    )
    assert code == 3
    assert out == ""
    assert len(run_logs(tmp_path)) == 4
    lines = err.splitlines()
    assert "error: job 1 (strategy.split.prompt=2 workload=synthetic): needs 10 GB, has 5" in lines
    assert lines[0] == "job 0 (1 of 4): strategy.split.prompt=1"
    assert lines[1].startswith("job 0 (1 of 4): done in ")
    assert lines[-4] == "2 of 4 points failed:"
    assert lines[-3] == "  job 1 (strategy.split.prompt=2): needs 10 GB, has 5"
    assert lines[-2].startswith("  job 2 (strategy.split.prompt=0): strategy.split.prompt=0: ")
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open(encoding="utf-8")))
    assert [(row["job"], row["strategy.split.prompt"], row["outcome"]) for row in rows] == [
        ("0", "1", "done"),
        ("1", "2", "infeasible"),
        ("2", "0", "wrong_config"),
        ("3", "3", "done"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_the_workflow_clean_up_undisturbed_and_ends_with_130(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = start(tmp_path, "wait", "model=tiny-llama")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == "cleaning\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == "clean\n"
    assert "Traceback" not in err
    assert len(err.splitlines()) < 10
    assert err.splitlines()[-1] == "interrupted"


def test_queries_print_and_run_nothing(tmp_path: Path) -> None:
    code, out, _ = finish(tmp_path, "unexpected", "--help")
    assert code == 0
    assert "strategy: auto, colocated, disaggregated" in out
    # Hydra writes the options of a group into one line, and there are many models and experiments.
    assert max(len(line) for line in out.splitlines() if not line.startswith(("model: ", "experiment: "))) <= 120
    code, out, _ = finish(tmp_path, "unexpected", "--cfg", "job", "--resolve", "workload.seed=3")
    assert code == 0
    assert "seed: 3" in out
    assert "${" not in out
    code, out, _ = finish(tmp_path, "unexpected", "--info", "defaults")
    assert code == 0
    assert "strategy/disaggregated" in out
    assert list(tmp_path.iterdir()) == []


def test_the_checks_load_no_heavy_library() -> None:
    program = (
        "import sys; from dejavu.cli.command import run_command; from dejavu.cli.interruption import Interruption; "
        "from dejavu.clock import SystemClock; "
        "assert run_command(['model=hub', 'model.name=a/b', 'workload.rate=-1'], Interruption(SystemClock())) == 2; "
        "assert not {'torch', 'transformers', 'grpc', 'ucxx', 'huggingface_hub'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=120, capture_output=True)


def test_bash_completes_groups_options_and_keys(tmp_path: Path) -> None:
    script = f"""
    PATH={Path(sys.executable).parent}:$PATH
    eval "$(python -m dejavu.run -sc install=bash)"
    COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
    try() {{
      COMP_LINE="$1"; read -ra COMP_WORDS <<< "$1"; COMPREPLY=()
      _dejavu_complete; echo "${{COMPREPLY[*]}}"
    }}
    try "python -m dejavu.run model=tiny-q"
    try "python -m dejavu.run strategy=colocated cluster.num"
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.splitlines() == ["tiny-qwen2 tiny-qwen3", "cluster.num_machines= cluster.num_workers="]
