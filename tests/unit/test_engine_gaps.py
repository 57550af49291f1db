"""Work that is done in the gaps: on a thread of low priority, while the caller waits."""

from __future__ import annotations

import os
import threading

import pytest

from dejavu.engine.gaps import in_the_gaps


def priority_here() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_in_the_gaps_has_a_low_priority_and_leaves_the_caller_its_own() -> None:
    before = priority_here()
    assert in_the_gaps(priority_here) > before
    assert priority_here() == before


def test_what_fails_in_the_gaps_fails_for_the_caller() -> None:
    def fail() -> None:
        raise KeyError("no such weight")

    with pytest.raises(KeyError, match="no such weight"):
        in_the_gaps(fail)
