"""Settings that know how to be told: the fields of a settings class are the one owner of names,
defaults and help texts, and flags are made from them (`octavo.cli.engine_flags`)."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    """A field of a settings dataclass."""
    return field(default=default, metadata={"help": help, "choices": choices})
