"""The engine's flags, read off ``octavo.config.EngineArgs``: names and defaults have one owner.

A flag that is not given does not appear in the parsed arguments, so that "not said" and "said the
default" stay different things, and ``engine_kwargs`` passes on only what was said.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection
from typing import Any

from octavo.cli import UsageError
from octavo.config import EngineArgs, parse_bytes
from octavo.errors import ConfigError

_DEST = "engine_"


def add_engine_flags(parser: argparse.ArgumentParser, *, skip: Collection[str] = ()) -> None:
    """Add ``--name`` for every field of EngineArgs but ``model`` and those of ``skip``."""
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        if field.name == "model" or field.name in skip:
            continue
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=_DEST + field.name,
            default=argparse.SUPPRESS,
            help=_help(field),
            **_settings(field, hints[field.name]),
        )


def engine_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments for ``LLM`` that the user gave. Raises UsageError for a bad value."""
    given = {
        name.removeprefix(_DEST): value
        for name, value in vars(args).items()
        if name.startswith(_DEST)
    }
    try:
        EngineArgs(**given)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return given


def _help(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata["help"]
    if field.default is not None:
        shown = field.default
        if isinstance(shown, bool):
            shown = "on" if shown else "off"
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def _settings(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """What argparse needs to know of a field whose type is ``hint``."""
    if field.metadata["choices"]:
        return {"choices": field.metadata["choices"]}
    if field.name == "kv_cache_memory":
        return {"type": _bytes, "metavar": "BYTES"}
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if int in kinds:
        return {"type": int, "metavar": "N"}
    if float in kinds:
        return {"type": float, "metavar": "X"}
    return {"metavar": "JSON" if "JSON" in field.metadata["help"] else "NAME"}


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
