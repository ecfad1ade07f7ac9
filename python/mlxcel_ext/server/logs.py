"""Structured logs: one line an event, its fields as key=value or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class _Formatter(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields: dict[str, Any] = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
            return json.dumps({**line, "trace": trace} if trace else line, ensure_ascii=False, default=str)
        # json.dumps quotes what came from outside: a path with a line feed stays one line.
        pairs = "".join(f" {name}={_plain(value)}" for name, value in fields.items())
        return f"{stamp} {record.levelname.lower()} {record.getMessage()}{pairs}" + (
            f"\n{trace}" if trace else ""
        )


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)


def set_up(level: str, log_format: str) -> None:
    """Send the package's and uvicorn's logs to stderr in that format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(log_format == "json"))
    for name in ("mlxcel_ext", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
