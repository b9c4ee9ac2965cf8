"""Declares flags that many commands have, and makes dataclasses of those that were given."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.base.errors import ConfigError
from octavo.cli import UsageError
from octavo.runtime.layout import parse_ranks

T = TypeVar("T")
Parser = argparse.ArgumentParser | argparse._ArgumentGroup


def whole_number(text: str, least: int = 1) -> int:
    """Parse an integer of at least ``least``, for ``type=`` of argparse."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least {least}")
    return value


def non_negative(text: str) -> int:
    """Parse an integer of at least 0, for ``type=`` of argparse."""
    return whole_number(text, least=0)


def number_of_ranks(text: str) -> int | str:
    """Parse the value of ``--tensor-parallel-size``, for ``type=`` of argparse."""
    try:
        return parse_ranks(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def real_number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Make a function that parses a number, for ``type=`` of argparse. ``what``: in its errors."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):  # a NaN never does
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
        return value

    return parse


above_zero = real_number("number above 0", lambda value: 0 < value < math.inf)
probability = real_number("probability, from 0 to 1", lambda value: 0 <= value <= 1)


def add_value(
    parser: Parser,
    usage: str,
    help: str,
    type: Callable[[str], Any] = str,
    **settings: Any,
) -> argparse.Action:
    """Add a flag that takes one value. ``usage``: its names and its value, as ``--rate R``."""
    *flags, metavar = usage.split()
    return parser.add_argument(*flags, metavar=metavar, help=help, type=type, **settings)


def add_switch(parser: Parser, flag: str, help: str) -> None:
    """Add a flag that is on if it is given."""
    parser.add_argument(flag, action="store_true", help=help)


def add_number(
    parser: Parser, flag: str, help: str, default: int | None = None, *, least: int = 1
) -> None:
    """Add a flag of a whole number; its default, if it has one, is said in the help."""
    shown = help if default is None else f"{help} (default: {default})"
    parse = whole_number if least else non_negative
    add_value(parser, f"{flag} N", shown, parse, default=default)


def add_json_flag(parser: Parser) -> None:
    add_switch(parser, "--json", "print one JSON object")


def from_flags(
    of: type[T], args: argparse.Namespace, *, skip: Collection[str] = (), **others: Any
) -> T:
    """Make a dataclass of the flags that are named as its fields, and of ``others``.

    A flag that was not given is None, and leaves the field its default; so do those of ``skip``.
    """
    names = {field.name for field in dataclasses.fields(of)} - set(skip)  # type: ignore[arg-type]
    given = {n: value for n, value in vars(args).items() if n in names and value is not None}
    return of(**{**given, **others})


def as_command_line(settings: Mapping[str, Any]) -> list[str]:
    """Return settings by their names as a command line has them."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None:
            continue  # as if it was not there
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}={each}" for each in value]
        elif isinstance(value, Mapping):
            flags.append(f"--{flag}={json.dumps(value)}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


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
