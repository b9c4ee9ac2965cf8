"""Texts that are given as files."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.cli import UsageError


def read_text(path: str, flag: str) -> str:
    """The whole text of a file that ``flag`` names, its BOM and line ends as they are.

    ``-`` is standard input. Raises UsageError.
    """
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(path).expanduser().read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text, at byte {error.start}: {error.reason}"
        raise UsageError(f"{flag} {path}: {reason}") from error
