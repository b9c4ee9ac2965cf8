"""Settings dataclasses that are the one owner of names, defaults and help texts.

The flags of commands are made from their fields (`octavo.cli.engine_flags`).
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any

from octavo.base.errors import ConfigError

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|)")
# Units of durations, in seconds; a number alone counts milliseconds.
SECONDS_OF = {"": 1e-3, "ms": 1e-3, "s": 1.0}


def option(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    """Return a field of a settings dataclass, with its default, help text and choices."""
    return field(default=default, metadata={"help": help, "choices": choices})


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
