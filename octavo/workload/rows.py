"""Reads rows of request files, JSON lines and CSV, checked field by field.

Files come from elsewhere: errors tell their name and the line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeVar

from octavo.base.errors import BenchmarkError

LARGEST_COUNT = 2**31 - 1  # of tokens: beyond it, a file is damaged
LARGEST_NUMBER = 1e15  # of milliseconds: 30 000 years

T = TypeVar("T")
NumberedRow = tuple[int, Mapping[str, Any]]  # line number, fields


class WorkloadFileError(BenchmarkError):
    """An error in a file of requests; says where, and what is expected there."""

    def __init__(self, path: str | Path, reason: str, line: int | None = None):
        super().__init__(f"{path}{'' if line is None else f':{line}'}: {reason}")
        self.path = Path(path)
        self.line = line


class BadRow(ValueError):
    """An error in one row of a file; the reader of the file adds the name and the line."""


# -- lines ----------------------------------------------------------------------------------------


@contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """Open a text file, its line ends as they are. Errors of reading, in the block too, become
    WorkloadFileErrors."""
    try:
        with open(Path(path).expanduser(), encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise WorkloadFileError(path, "is not text in UTF-8") from error
    except OSError as error:
        raise WorkloadFileError(path, f"cannot be read: {error.strerror}") from error


def peek(file: Iterable[str]) -> tuple[str, Iterator[str]]:
    """Return the first line that is not blank, and all lines, it included: pipes cannot be
    rewound."""
    lines, head = iter(file), []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    return (head[-1].strip() if head else ""), chain(head, lines)


def json_rows(path: str | Path, lines: Iterable[str]) -> Iterator[NumberedRow]:
    """Yields the object on each line; blank lines are skipped. Raises WorkloadFileError."""
    for line, written in enumerate(lines, start=1):
        if not written.strip():
            continue
        try:
            row = json_row(written)
        except BadRow as problem:
            raise WorkloadFileError(path, str(problem), line) from None
        yield line, row


def csv_rows(
    path: str | Path, lines: Iterable[str], needed: Sequence[str]
) -> Iterator[NumberedRow]:
    """Yields rows by the names of the columns, whatever their order; an empty cell is None.

    Raises:
        WorkloadFileError: not CSV, a column of ``needed`` is missing, or a row is too short.
    """
    reader = csv.reader(lines, strict=True)
    try:
        names = [name.strip() for name in next((row for row in reader if row), [])]
        if missing := [name for name in needed if name not in names]:
            reason = f"the first line has no column {', '.join(missing)}"
            raise WorkloadFileError(path, reason, max(reader.line_num, 1))
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                reason = f"{len(cells)} columns, where the first line has {len(names)}"
                raise WorkloadFileError(path, reason, reader.line_num)
            row = {name: cell or None for name, cell in zip(names, cells, strict=True)}
            yield reader.line_num, row
    except csv.Error as error:
        raise WorkloadFileError(path, f"not CSV: {error}", reader.line_num) from None


# -- fields ---------------------------------------------------------------------------------------
def json_row(line: str) -> dict[str, Any]:
    """Parse the object on one line. Raises BadRow."""
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadRow("the JSON is nested too deeply") from None
    except ValueError as error:
        raise BadRow(f"not a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise BadRow(f"a JSON {type(row).__name__}, where an object is expected")
    return row


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def number(row: Mapping[str, Any], name: str) -> float:
    """Return a time or an amount, which is not below zero."""
    value = row.get(name)
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        value = float(value)
        if not 0 <= value <= LARGEST_NUMBER:
            raise ValueError
    except (ValueError, OverflowError):
        raise BadRow(f"{name} is {row.get(name)!r}, not a number from 0 on") from None
    return value


def integer(row: Mapping[str, Any], name: str) -> int:
    """Return a whole number; 12.0 is one, as pandas writes a column with gaps."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = float(value) if "." in value else int(value)
        except ValueError:
            value = None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRow(f"{name} is {row.get(name)!r}, not a whole number")
    return value


def count(row: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    value = integer(row, name)
    if not least <= value <= LARGEST_COUNT:
        raise BadRow(f"{name} is {value}, not a whole number from {least} to {LARGEST_COUNT}")
    return value


def positive(row: Mapping[str, Any], name: str) -> int:
    return count(row, name, least=1)


def text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise BadRow(f"{name} is {value!r}, not text")
    return value


def label(row: Mapping[str, Any], name: str) -> str:
    """Return a name, which may be a number: some traces number their sessions."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRow(f"{name} is {value!r}, neither text nor a whole number")
    return str(value)


def optional(row: Mapping[str, Any], name: str, kind: Callable[..., T]) -> T | None:
    return None if row.get(name) is None else kind(row, name)
