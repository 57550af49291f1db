"""The end of a service: told again, it does not wait; with nobody to read what it prints, it waits all the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from harness.launched import eventually, own_store
from harness.processes import our_processes, wait_gone
from harness.served import PATIENCE_S, Served, chatty_model, served
from harness.whole_model import Right

pytestmark = [pytest.mark.slow, pytest.mark.grid]

WORKERS = ["strategy=colocated", "strategy.stages=2", "serve.drain_timeout_s=120"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return chatty_model(tmp_path)


@pytest.fixture
def service(folder: Path, tmp_path: Path) -> Iterator[Served]:
    before = our_processes()
    model = ["model=local", f"model.path={folder}"]
    with own_store(tmp_path) as store, served(tmp_path, store, *model, *WORKERS) as made:
        yield made
    assert wait_gone(before, timeout_s=10.0) == {}


def stream_of(service: Served) -> openai.Stream[openai.types.Completion]:
    return service.client.completions.create(
        model="chatty", prompt="the end", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_told_again_it_aborts_what_is_open_and_leaves_no_process(service: Served, signum: signal.Signals) -> None:
    # A worker that is frozen ends no request by itself.
    stream = stream_of(service)
    next(stream)
    service.strike("w1", signal.SIGSTOP)
    service.run.send(signum)
    eventually(lambda: service.get("/ready")[0] == 503, "it is not ready any more")

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(list, stream)

        def is_cut_off() -> bool:
            # Not the first of them counts: it may be the echo of the one before.
            service.run.send(signum)
            return answered.done()

        eventually(is_cut_off, "the answer is cut off", PATIENCE_S)
        assert answered.exception() is not None, "it had a whole answer"
    assert service.run.process.wait(PATIENCE_S) == 130


def test_a_cluster_that_fails_while_the_service_stops_is_told_and_is_no_good_end(folder: Path, tmp_path: Path) -> None:
    before = our_processes()
    overrides = ["model=local", f"model.path={folder}", "strategy=colocated", "strategy.stages=1"]
    # The only worker has nobody to take its place.
    overrides += ["strategy.may_grow=false", "serve.drain_timeout_s=120"]
    with own_store(tmp_path) as store, served(tmp_path, store, *overrides) as service:
        stream = stream_of(service)
        next(stream)
        service.strike("w0", signal.SIGSTOP)
        service.run.send(signal.SIGTERM)
        eventually(lambda: service.get("/ready")[0] == 503, "it is not ready any more")
        service.strike("w0")
        with pytest.raises(openai.APIError, match="the cluster failed"):
            list(stream)
        status, _, err = service.run.end()
    assert status == 1
    assert "the service failed while it was stopping" in err
    assert wait_gone(before, timeout_s=10.0) == {}


def test_with_nobody_to_read_what_it_prints_it_ends_what_is_open(service: Served, folder: Path) -> None:
    """``| tee`` dies of the same Ctrl-C: the requests were aborted, and the exit status was 1."""
    stream = stream_of(service)
    text = next(stream).choices[0].text
    for pipe in (service.run.process.stdout, service.run.process.stderr):
        assert pipe is not None
        pipe.close()
    service.run.send(signal.SIGINT)
    text += "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert text == Right(folder).text("the end", 200)
    assert service.run.process.wait(PATIENCE_S) == 0
