"""Settings dataclasses that are the one owner of names, defaults and help texts.

The flags of commands are made from their fields (`octavo.cli.engine_flags`).
"""

from __future__ import annotations

import re
from dataclasses import field, fields
from typing import Any

from octavo.base.errors import ConfigError

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|)")
# Units of durations, in seconds; a number alone counts milliseconds.
SECONDS_OF = {"": 1e-3, "ms": 1e-3, "s": 1.0}


def option(
    default: Any, help: str, choices: tuple[Any, ...] | None = None, *, least: float | None = None
) -> Any:
    """Return a field of a settings dataclass, with its default, help text and choices.

    ``least``: the smallest value that `check_least` accepts; an integer means integers only.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "least": least})


def check_least(settings: Any) -> None:
    """Raise ConfigError if a field is below its ``least``. None is accepted where the annotation
    allows it."""
    for each in fields(settings):
        value, least = getattr(settings, each.name), each.metadata["least"]
        may_be_none = "None" in str(each.type)
        if least is not None and not (value is None and may_be_none):
            check_number(each.name, value, least)


def check_number(name: str, value: Any, least: float) -> None:
    """Raise ConfigError unless a value is a number of at least ``least``, an integer if that is
    one."""
    kinds = (int,) if isinstance(least, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
        kind = "an integer of at least" if kinds == (int,) else "at least"
        raise ConfigError(f"{name} must be {kind} {least:g}, not {value!r}")


def parse_duration(value: float | str) -> float:
    """Return the seconds of a number of milliseconds, or of a text such as ``500``, ``500ms``,
    ``0.5s``.

    ConfigError if it is no time above 0.
    """
    match = _DURATION.fullmatch(str(value).strip().lower())
    seconds = float(match[1]) * SECONDS_OF[match[2]] if match else 0.0
    if not seconds > 0:
        raise ConfigError(f"{value!r:.80} is no time above 0: write 500, 500ms or 0.5s")
    return seconds
