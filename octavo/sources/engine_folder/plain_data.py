"""Frozen dataclasses of plain values from JSON, by the types of their fields.

Values are numbers, texts, truths, tables by name, tuples of them, and further dataclasses; any of
these may be None where the type says so. ``dataclasses.asdict`` is the way there.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from octavo.base.fields import Fields

T = TypeVar("T")

# A value that no field of a model has.
_LARGEST_INTEGER, _LARGEST_NUMBER = 1 << 31, 1e18


def read_dataclass(fields: Fields, of: type[T], **known: Any) -> T:
    """Return a value of the dataclass ``of``. ``known`` are fields that are not read.

    Raises:
        ModelFileError: a field is missing, even if it has a default, or is of another type; names
            it.
    """
    hints = typing.get_type_hints(of)
    for field in dataclasses.fields(of):  # type: ignore[arg-type]
        if field.name not in known:
            known[field.name] = _read(fields, field.name, hints[field.name])
    return of(**known)


def _read(fields: Fields, name: str, of: Any) -> Any:
    origin, arguments = typing.get_origin(of), typing.get_args(of)
    if origin in (types.UnionType, typing.Union):
        (of,) = (each for each in arguments if each is not types.NoneType)
        return _read(fields, name, of) if name in fields else None
    if origin is tuple:
        return tuple(fields.each(name, partial(_read_entry, arguments[0])))
    if origin is Literal:
        return _one_of(fields, name, arguments)
    if origin is not None and issubclass(origin, Mapping):
        section = fields.section(name)
        return {key: _read(section, key, arguments[1]) for key in section}
    if dataclasses.is_dataclass(of):
        assert isinstance(of, type)
        return read_dataclass(fields.section(name), of)
    return _plain(fields, name, of)


def _read_entry(of: Any, fields: Fields, name: str) -> Any:
    return _read(fields, name, of)


def _plain(fields: Fields, name: str, of: Any) -> Any:
    if of is bool:
        return fields.boolean(name)
    if of is int:
        return fields.integer(name, minimum=-_LARGEST_INTEGER)
    if of is float:
        return fields.number(name, above=-_LARGEST_NUMBER)
    assert of is str, of
    return fields.text(name)


def _one_of(fields: Fields, name: str, known: tuple[str, ...]) -> str:
    value: str = fields.text(name)
    if value not in known:
        raise fields.error(name, f"{value!r:.60} is none of {', '.join(known)}")
    return value
