"""What a log record looks like on the terminal, and which records the terminal has had already."""

from __future__ import annotations

import copy
import logging

TOLD = "told"
"""Attribute of a record whose message a person has been shown; ``extra={TOLD: True}`` sets it."""


class TerseFormatter(logging.Formatter):
    """A line a record, without its traceback, which is the log file's."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The record's level and message. The record itself is unchanged, for handlers that want the traceback."""
        bare = copy.copy(record)
        bare.exc_info = None
        bare.exc_text = None
        bare.stack_info = None
        return super().format(bare)


class Untold(logging.Filter):
    """Drops records whose message the terminal has had."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a record that is marked as told."""
        return not getattr(record, TOLD, False)
