"""A worker with a fault: ``python odd_worker.py FAULT [VALUE]``. Everything else is the real one.

Faults: ``slow-load S`` sleeps, GIL held, before the stage is loaded; ``hold-gil S`` does so in the third step;
``raise-in-step`` lets the third step fail, ``raise-once FILE`` only while the file is not there, and makes it;
``raise-in-prompt FILE`` does so in the first prompt;
``fixed-port P`` listens at the first free port from P on, so that who comes back has the address of who died.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import Any

from dejavu import worker
from dejavu.models.stage import StageModel
from dejavu.transport.base import TransportError
from dejavu.transport.engine import LinkTransport

NUM_PORTS = 16


def hold_gil(seconds: float) -> None:
    """One C call that keeps the GIL: no thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def slow_load(value: str) -> None:
    load = StageModel.load

    def slow(*args: Any, **options: Any) -> StageModel:
        hold_gil(float(value))
        return load(*args, **options)

    StageModel.load = staticmethod(slow)  # type: ignore[assignment,method-assign]


def odd_step(fault: str, value: str) -> None:
    step, calls = StageModel.step, [0]

    def odd(self: StageModel, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            if fault == "hold-gil":
                hold_gil(float(value))
            elif fault == "raise-in-step" or not Path(value).exists():
                if value:
                    Path(value).touch()
                raise RuntimeError("the third step fails on purpose")
        return step(self, *args, **options)

    StageModel.step = odd  # type: ignore[method-assign]


def odd_prompt(marker: Path) -> None:
    prompt = StageModel.prompt

    def odd(self: StageModel, *args: Any, **options: Any) -> Any:
        if not marker.exists():
            marker.touch()
            raise RuntimeError("the first prompt fails on purpose")
        return prompt(self, *args, **options)

    StageModel.prompt = odd  # type: ignore[method-assign]


def fixed_port(first: int) -> None:
    listen = LinkTransport.listen

    def at_a_known_port(self: LinkTransport, handler: Any, *, host: str = "127.0.0.1", port: int = 0) -> str:
        for known in range(first, first + NUM_PORTS):
            try:
                return listen(self, handler, host=host, port=known)
            except TransportError:
                continue
        raise TransportError("no port is free", peer="listener", phase="listen")

    LinkTransport.listen = at_a_known_port  # type: ignore[method-assign]


def install(fault: str, value: str) -> None:
    match fault:
        case "slow-load":
            slow_load(value)
        case "raise-in-prompt":
            odd_prompt(Path(value))
        case "fixed-port":
            fixed_port(int(value))
        case _:
            odd_step(fault, value)


if __name__ == "__main__":
    install(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
    status = worker.main()
    logging.shutdown()
    os._exit(status)
