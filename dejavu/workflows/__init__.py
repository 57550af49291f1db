"""One file a workflow; the only importers of operators.

A workflow is a module with ``run(config, output)``: it does what the declaration says, leaves its files in the folder
``output``, and returns None or an exit code. ``dejavu.config.WorkflowName`` lists them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from dejavu.config import Config

Entry = Callable[[Config, Path], int | None]


def entry(name: str) -> Entry:
    """The ``run`` of the workflow ``name``. Imported only now: it brings torch, for which no check must wait."""
    run: Entry = importlib.import_module(f"{__name__}.{name}").run
    return run
