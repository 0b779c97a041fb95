"""What the engine logs, as one line each on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Line(logging.Formatter):
    """Level, message and the cause, without a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        cause = record.exc_info[1] if record.exc_info else None
        if cause is not None:
            text += f": {type(cause).__name__}: {' '.join(str(cause).split())}"
        return text


@contextmanager
def brief_log() -> Iterator[None]:
    """Show the package's warnings and errors without tracebacks."""
    logger = logging.getLogger("deepinfer_neuron")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
