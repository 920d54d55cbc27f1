"""Logs of the server's two processes: lines for people, or JSON objects, one a line, for machines.

Whoever logs for a request says nothing of it: the line has its id. Fields of their own come with
`extra={"fields": {...}}`; a line for people leaves them out, so the message has to say what they do.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import IO

FORMAT_VARIABLE = "ATLAS_LOG_FORMAT"
"""Environment variable by which the engine process is told how to log."""

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that the current task works for."""


def configure(level: str, log_format: str, process: str, stream: IO[str] | None = None) -> None:
    """Make the root logger write to `stream` (standard error). `process` is a name for JSON lines: api or engine."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(process) if log_format == "json" else Lines())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def environment(log_format: str) -> dict[str, str]:
    """What makes a child process log as this one does."""
    return {FORMAT_VARIABLE: log_format}


class Lines(logging.Formatter):
    """A line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        current = request_id.get()
        return line if current is None else f"{line} [{current}]"


class JsonLines(logging.Formatter):
    """A JSON object. Its keys: time (UTC), level, logger, process, message, request_id, exception, and a line's own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= getattr(record, "fields", {})
        return json.dumps(line, default=str)
