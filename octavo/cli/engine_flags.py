"""Flags read off settings classes, such as ``EngineArgs``, which stay the one owner
of names, defaults and help texts.

A flag that is not given does not appear in the parsed arguments, so that "not said" and "said the
default" stay different things, and ``given_settings`` passes on only what was said.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from octavo.base.errors import ConfigError
from octavo.cli import UsageError
from octavo.cli.flags import number_of_ranks
from octavo.cli.parser import rarely
from octavo.hub import DEFAULT_MODEL
from octavo.lora.limits import named_adapters
from octavo.lora.request import LoRARequest
from octavo.settings.engine import EngineArgs, parse_bytes
from octavo.settings.replica_range import parse_replicas

# Settings that are sizes in bytes.
_SIZES = (
    *("kv_cache_memory", "kv_buffer_size", "response_cache", "max_unread_bytes"),
    *("lora_memory", "model_memory"),
)
# Settings about adapters, for commands whose requests have none.
LORA_SETTINGS = frozenset(
    ("enable_lora", "lora", "max_loras", "max_lora_rank", "lora_memory", "lora_dtype")
)
# Settings of an engine that are in the short help of commands.
_OFTEN = (*("device", "kv_cache_dtype", "max_model_len", "max_num_seqs", "spec_method", "threads"),)


def add_model_argument(
    parser: argparse.ArgumentParser, default: str = DEFAULT_MODEL
) -> argparse.Action:
    """Add the optional positional MODEL. ``default``: what the arguments have without one, which
    may be nothing (``argparse.SUPPRESS``)."""
    return parser.add_argument(
        "model",
        nargs="?",
        default=default,
        metavar="MODEL",
        help=f"alias, folder, .gguf file or hub id (default: {DEFAULT_MODEL})",
    )


def add_engine_flags(
    parser: argparse.ArgumentParser,
    *,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
    often: Collection[str] = _OFTEN,
) -> argparse._ArgumentGroup:
    """Add ``--name`` for every field of EngineArgs but ``model`` and those of ``skip``; ``often``
    names those that are in the short help."""
    return add_flags(parser, "engine", EngineArgs, skip={"model", *skip}, only=only, often=often)


def engine_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments for ``LLM`` that the user gave. Raises UsageError for a bad value."""
    return given_settings(args, EngineArgs)


def answering_adapter(engine: Mapping[str, Any]) -> dict[str, LoRARequest]:
    """Return what calls of `LLM` are told of the adapter that answers a command's prompts: that of
    ``--lora``, if it is given. UsageError if there are several."""
    named = named_adapters(engine.get("lora", ()))
    if len(named) > 1:
        raise UsageError("--lora: give the one adapter that is to answer; a server can have many")
    return {"lora_request": named[0]} if named else {}


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    settings_class: type[Any],
    *,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
    often: Collection[str] | None = None,
) -> argparse._ArgumentGroup:
    """Add ``--name`` for every field of a settings class but those of ``skip``, or for those of
    ``only``; return their group.

    ``often`` names the fields that are in the short help: all, where it is None.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(settings_class)
    for field in dataclasses.fields(settings_class):
        if field.name in skip or (only is not None and field.name not in only):
            continue
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(
            flag,
            dest=_dest(settings_class) + field.name,
            default=argparse.SUPPRESS,
            help=_help(field),
            **_settings(field, hints[field.name]),
        )
        if often is not None and field.name not in often:
            rarely(group, flag)
    return group


def given_settings(args: argparse.Namespace, settings_class: type[Any]) -> dict[str, Any]:
    """The fields of a settings class that the user gave. Raises UsageError for a bad value."""
    prefix = _dest(settings_class)
    given = {
        name.removeprefix(prefix): tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name.startswith(prefix)
    }
    try:
        settings_class(**given)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return given


def _dest(settings_class: type[Any]) -> str:
    return settings_class.__name__ + "_"


def _help(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata["help"]
    if field.default not in (None, ()):
        shown = field.default
        if isinstance(shown, bool):
            shown = "on" if shown else "off"
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def _settings(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return the settings of argparse for a field whose type is ``hint``."""
    if field.metadata["choices"]:
        return {"choices": field.metadata["choices"]}
    if field.name in _SIZES:
        return {"type": _bytes, "metavar": "BYTES"}
    if field.name == "max_model_len":
        return {"type": _length, "metavar": "N"}
    if field.name == "tensor_parallel_size":
        return {"type": number_of_ranks, "metavar": "N"}
    if field.name in ("max_predicted_ttft", "target_ttft"):
        return {"metavar": "MS"}
    if field.name == "data_parallel_size":
        return {"type": _replicas, "metavar": "N"}
    if field.name == "ray_address":
        return {"metavar": "HOST:PORT"}
    if field.name == "lora":
        return {"action": "extend", "nargs": "+", "metavar": "NAME=PATH"}
    if typing.get_origin(hint) is tuple:
        return {"action": "append", "metavar": field.name.rpartition("_")[2].upper()}
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if int in kinds:
        return {"type": int, "metavar": "N"}
    if float in kinds:
        return {"type": float, "metavar": "X"}
    words = field.metadata["help"].split()
    if "file" in words or "DIR" in words:
        return {"metavar": "FILE" if "file" in words else "DIR"}
    return {"metavar": "JSON" if "JSON" in field.metadata["help"] else "NAME"}


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _replicas(text: str) -> int | str:
    try:
        least, most = parse_replicas(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return least if least == most else text


def _length(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, nor auto") from error
