"""``OpFields``: the fields of a fused op, which one description both writes as JSON and reads back.

A description is a function that calls a method of ``OpFields`` for each field, in JSON's order.
Every method returns the field's value, whichever way it goes, so that the sizes of other fields
follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from octavo.base.fields import Fields
from octavo.base.json_values import finite_or_none
from octavo.kernels.fused_ops import FusedNorm, WeightRef
from octavo.kernels.recorder import RopeTable, Tape, Value
from octavo.models.config import ModelConfig

MAX_WIDTH = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight of the folder."""

    name: str
    shape: tuple[int, int]


class StoredRefs:
    """Finds what the names and numbers in a program stand for, and which values were written.

    Args:
        shapes: rows and columns of every weight of the folder.
        constants: float32, of one dimension each.
        widths: how many numbers each value has.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        constants: Sequence[np.ndarray],
        widths: Sequence[int],
    ):
        self.tape = Tape()
        self.values = [Value(self.tape, None, (width,)) for width in widths]
        self.ropes: list[RopeTable] = []
        self.written: set[int] = set()  # numbers of values
        self.layers: set[tuple[int, str]] = set()  # that were read, and which of their ops
        self._shapes, self._constants = shapes, constants

    def value(self, fields: Fields, key: str) -> tuple[int, Value]:
        """Return a value and its number, in the shape in which it is named here."""
        number, *shape = fields.each(
            key, lambda f, entry: f.integer(entry, minimum=0, maximum=MAX_WIDTH)
        ) or [len(self.values)]
        value: Value = _at(self.values, number, fields, key, "values")
        if not 1 <= len(shape) <= 2 or prod(shape) != value.width:
            raise fields.error(key, f"{value.width} numbers cannot be seen as {shape}")
        return number, value if len(shape) == 1 else value.view(-1, *shape)

    def stores(self, value: Value) -> bool:
        """True if a value has a number, and so is written to memory."""
        return value in self.values

    def constant(self, fields: Fields, key: str, size: int) -> np.ndarray:
        number = fields.integer(key, minimum=0)
        array: np.ndarray = _at(self._constants, number, fields, key, "constants")
        if array.shape != (size,):
            raise fields.error(key, f"constant {number} has the shape {array.shape}, not ({size},)")
        return array

    def weight(self, fields: Fields, key: str) -> WeightRef:
        name = fields.text(key)
        if name not in self._shapes:
            raise fields.error(key, f"there is no weight {name!r:.100}")
        return StoredMatrix(name, self._shapes[name])

    def rope(self, fields: Fields, key: str) -> RopeTable:
        rope: RopeTable = _at(self.ropes, fields.integer(key, minimum=0), fields, key, "ropes")
        return rope


def _at(known: Sequence[Any], number: int, fields: Fields, key: str, what: str) -> Any:
    if number >= len(known):
        raise fields.error(key, f"there are {len(known)} {what}")
    return known[number]


class OpFields:
    """Writes the fields of ``op`` into ``json``; or, without one, reads ``values`` from ``fields``.

    A field that is None is left out of JSON, or null in parts of ops (``keeps_nulls``).

    Args:
        refs: makes JSON of what an op refers to; to read, ``StoredRefs``.
    """

    def __init__(
        self,
        model: ModelConfig,
        refs: Any,
        op: Any = None,
        fields: Fields | None = None,
        keeps_nulls: bool = False,
    ):
        self.model, self.refs = model, refs
        self.json: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.outputs: set[int] = set()  # numbers of values that it writes
        self._op, self._fields, self._keeps_nulls = op, fields, keeps_nulls

    def field(
        self,
        name: str,
        write: Callable[[Any], Any],
        read: Callable[[Fields, str], Any],
        key: str = "",
        optional: bool = False,
    ) -> Any:
        """Write or read one field; ``key``: its name in JSON, where that is another one."""
        key = key or name
        if self._fields is not None:
            is_there = not optional or key in self._fields
            self.values[name] = read(self._fields, key) if is_there else None
            return self.values[name]
        value = getattr(self._op, name)
        self._put(key, None if value is None else write(value))
        return value

    def numbered(
        self, name: str, sizes: Sequence[int], write: Any, read: Callable[..., Any]
    ) -> None:
        """A tuple (``inputs``), whose entries are fields (``input_0``, …) of these sizes."""
        keys = [f"{name.removesuffix('s')}_{i}" for i in range(len(sizes))]
        if self._fields is not None:
            pairs = zip(keys, sizes, strict=True)
            self.values[name] = tuple(read(self._fields, key, size) for key, size in pairs)
            return
        for key, value in zip(keys, getattr(self._op, name), strict=True):
            self._put(key, None if value is None else write(value))

    def _put(self, key: str, json: Any) -> None:
        if json is not None or self._keeps_nulls:
            self.json[key] = json

    def expect(self, is_sound: bool, key: str, reason: str) -> None:
        """Raise ModelFileError, which says what is wrong with a field, unless it is sound."""
        if not is_sound:
            assert self._fields is not None, f"{self._op}: {key} {reason}"
            raise self._fields.error(key, reason)

    def expect_shape(self, key: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        self.expect(found == wanted, key, f"has the shape {found}, not {wanted}")

    # -- plain values -----------------------------------------------------------------------------

    def number(self, name: str, *default: Any) -> Any:
        return self.field(name, as_it_is, lambda f, key: f.number(key, *default))

    def bound(self, name: str) -> None:
        """A number that may be infinite, which JSON does not know: then it is left out."""
        self.field(
            name,
            finite_or_none,
            lambda f, key: f.number(key, math.inf, above=-1e-18),
        )

    def choice(self, name: str, known: Collection[str], **how: Any) -> Any:
        def read(fields: Fields, key: str) -> str:
            value: str = fields.text(key)
            if value not in known:
                raise fields.error(key, f"is none of {', '.join(known)}")
            return value

        return self.field(name, as_it_is, read, **how)

    def layer(self, op: str, count: int) -> None:
        """The layer of an op that each of ``count`` layers has once."""

        def read(fields: Fields, key: str) -> int:
            layer: int = fields.integer(key, minimum=0, maximum=count - 1)
            if (layer, op) in self.refs.layers:
                raise fields.error(key, f"layer {layer} has its {op} already")
            self.refs.layers.add((layer, op))
            return layer

        self.field("layer", as_it_is, read)

    # -- what an op refers to ---------------------------------------------------------------------

    def read_input(self, fields: Fields, key: str) -> Value:
        number, value = self.refs.value(fields, key)
        if number not in self.refs.written:
            raise fields.error(key, f"value {number} is read before an op writes it")
        assert isinstance(value, Value)
        return value

    def value(self, name: str, shape: tuple[int, ...] | None = None, **how: Any) -> Any:
        """Activations that an op before has written: of this shape for each token, or of any."""
        value = self.field(name, self.refs.value, self.read_input, **how)
        if shape is not None and value is not None:
            self.expect_shape(name, value.shape, shape)
        return value

    def flat(self, name: str, width: int | None = None, **how: Any) -> Any:
        """Activations in one dimension: ``width`` of them for each token, or any number."""
        value = self.value(name, **how)
        if value is not None:
            self.expect_shape(name, value.shape, (width or value.width,))
        return value

    def output(self, name: str, width: int, **how: Any) -> Any:
        """Activations that the op writes, and that those after it may read."""

        def read(fields: Fields, key: str) -> Value:
            number, value = self.refs.value(fields, key)
            if number in self.refs.written | self.outputs:
                raise fields.error(key, f"value {number} is written twice")
            if value.width != width:
                raise fields.error(key, f"value {number} has {value.width} numbers, not {width}")
            self.outputs.add(number)
            assert isinstance(value, Value)
            return value

        return self.field(name, self.refs.value, read, **how)

    def constant(self, name: str, size: int) -> Any:
        """A constant of so many numbers, or None."""

        def read(fields: Fields, key: str) -> Any:
            return self.refs.constant(fields, key, size)

        return self.field(name, self.refs.constant, read, optional=True)

    def norm(self, name: str, size: int, optional: bool = True) -> Any:
        def write(norm: FusedNorm) -> dict[str, Any]:
            return {"weight": self.refs.constant(norm.weight), "eps": norm.eps}

        def read(fields: Fields, key: str) -> FusedNorm:
            norm = fields.section(key)
            return FusedNorm(self.refs.constant(norm, "weight", size), norm.number("eps"))

        return self.field(name, write, read, optional=optional)

    def matrix(self, name: str, shape: tuple[int, ...] | None = None, **how: Any) -> Any:
        weight = self.field(name, self.refs.weight, self.refs.weight, **how)
        if shape is not None:
            self.expect_shape(how.get("key", name), weight.shape, shape)
        return weight

    def vocabulary(self, name: str) -> Any:
        """A weight with a row for each token of the vocabulary."""
        weight = self.matrix(name)
        rows, tokens = weight.shape[0], self.model.vocab_size
        self.expect(rows == tokens, name, f"has {rows} rows for a vocabulary of {tokens}")
        return weight

    def rope(self, name: str, **how: Any) -> Any:
        return self.field(name, self.refs.rope, self.refs.rope, **how)

    def each(
        self,
        name: str,
        make: Callable[..., Any],
        describe: Callable[[OpFields], None],
        count: int | None = None,
        keeps_nulls: bool = False,
    ) -> Any:
        """A list of parts with fields of their own; ``count``: how many there must be."""

        def write(part: Any) -> dict[str, Any]:
            fields = OpFields(self.model, self.refs, part, None, keeps_nulls)
            describe(fields)
            return fields.json

        def read(parent: Fields, entry: str) -> Any:
            fields = OpFields(self.model, self.refs, fields=parent.section(entry))
            fields.outputs = self.outputs
            describe(fields)
            return make(**fields.values)

        return self.field(
            name, lambda parts: [*map(write, parts)], lambda f, key: f.each(key, read, count)
        )


def as_it_is(value: Any) -> Any:
    """Return what JSON can say without a change."""
    return value
