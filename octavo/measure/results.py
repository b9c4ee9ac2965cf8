"""Writes result files atomically."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import BenchmarkError
from octavo.base.files import replace_file


def write_json(path: str | Path, document: Mapping[str, Any]) -> None:
    """Replace ``path`` by one JSON object, so that no reader ever finds half of it."""
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_json_lines(path: str | Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Replace ``path`` by one JSON object a line."""
    lines = (json.dumps(document, ensure_ascii=False, allow_nan=False) for document in documents)
    write_text(path, "".join(line + "\n" for line in lines))


def write_text(path: str | Path, text: str) -> None:
    """Replace ``path`` by ``text``; its folder is made if need be."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; its folder is made if need be.

    Raises:
        BenchmarkError: the file cannot be written; the old one is left as it was.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        reason = error.strerror or error
        raise BenchmarkError(f"{Path(path).expanduser()} cannot be written: {reason}") from error
