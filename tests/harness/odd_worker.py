"""A worker with a fault: ``python odd_worker.py FAULT [SECONDS]``. Everything else is the real one.

Faults: ``slow-load`` sleeps, GIL held, before the stage is loaded; ``hold-gil`` does so in the third step;
``raise-in-step`` lets the third step fail.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from typing import Any

from dejavu import worker
from dejavu.models.stage import StageModel


def hold_gil(seconds: float) -> None:
    """One C call that keeps the GIL: no thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def install(fault: str, seconds: float) -> None:
    load, step, calls = StageModel.load, StageModel.step, [0]

    def slow_load(*args: Any, **options: Any) -> StageModel:
        hold_gil(seconds)
        return load(*args, **options)

    def odd_step(self: StageModel, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            if fault == "raise-in-step":
                raise RuntimeError("the third step fails on purpose")
            hold_gil(seconds)
        return step(self, *args, **options)

    if fault == "slow-load":
        StageModel.load = staticmethod(slow_load)  # type: ignore[assignment,method-assign]
    else:
        StageModel.step = odd_step  # type: ignore[method-assign]


if __name__ == "__main__":
    install(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    status = worker.main()
    logging.shutdown()
    os._exit(status)
