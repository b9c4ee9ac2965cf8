"""Formatters of log records, as lines of text for people or JSON objects for programs.

A record may carry ``event`` and ``fields``: then its message is the readable form of them, and the
JSON has the fields themselves. Nothing that a client sent can forge a line or drive a terminal:
control characters are escaped.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_log = logging.getLogger("octavo.server")

# C0 and C1 controls, and what Unicode breaks lines or turns their direction with.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def create_formatter(log_format: str) -> logging.Formatter:
    """Return the formatter of "text" or "json" lines."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


def printable(text: str) -> str:
    """Return the text on one line, with control characters as ``\\x1b``."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """Formats ``2026-01-31 12:00:00.123 INFO message``.

    A traceback follows indented, so that no line of it can pass for a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        message = printable(record.getMessage())
        lines = [f"{seconds}.{int(record.msecs):03d} {record.levelname:<8} {message}"]
        lines += [
            f"    | {printable(line)}" for line in _traceback(self, record).split("\n") if line
        ]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """Formats one JSON object a line, in ASCII.

    It has ``time``, ``level``, ``logger``, ``message`` (the event's name, where it has one) and the
    fields of the record.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
            **getattr(record, "fields", {}),
        }
        traceback = _traceback(self, record)
        if traceback:
            line["exception"] = traceback
        return json.dumps(line, default=str)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def log_event(
    event: str, message: str, fields: Mapping[str, Any], level: int = logging.INFO
) -> None:
    """Write one line: ``message`` as text, ``event`` and ``fields`` as JSON."""
    _log.log(level, "%s", message, extra={"event": event, "fields": dict(fields)})
