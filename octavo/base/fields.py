"""Typed access to the fields of a model's config, or to the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as shown  # short, whatever the value is
from typing import Any

from octavo.base.errors import ModelFileError

# No number of a model is larger or smaller than these: beyond, arithmetic overflows.
_SMALLEST, _LARGEST = 1e-18, 1e18


class Fields:
    """Named values from ``path``; a missing one, or one of another type, is a ModelFileError.

    A missing field takes its default, and without one is an error. A null counts as missing.
    ``prefix`` is put before every name, in the file and in errors. ``names`` maps fields to the
    names that this file may have for them; the usual names work as well.

    ``asked`` collects the names that were read, as the file has them: fields of the file that are
    not in it were read by no code. Fields of its tables add to the same set.
    """

    _REQUIRED: Any = object()

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        prefix: str = "",
        names: Mapping[str, str] | None = None,
    ):
        self.path = path
        self.asked: set[str] = set()
        self._values = values
        self._prefix = prefix
        self._names = names or {}
        self._within = ""  # put before the names of ``values`` in ``asked``

    def __contains__(self, name: str) -> bool:
        return self._ask(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the fields that begin with the prefix."""
        return (key[len(self._prefix) :] for key in self._values if key.startswith(self._prefix))

    def raw(self, name: str, default: Any = None) -> Any:
        """Return the value without a check of its type."""
        value = self._ask(name)
        return default if value is None else value

    def integer(
        self, name: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = 1 << 31
    ) -> Any:
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"{shown(value)} is not a whole number of at least {minimum}")
        if value > maximum:
            raise self.error(name, f"{shown(value)} is more than any model has ({maximum})")
        return value

    def number(
        self,
        name: str,
        default: Any = _REQUIRED,
        above: float = _SMALLEST,
        maximum: float = _LARGEST,
    ) -> Any:
        value = self._get(name, default)
        if value is default:
            return value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(name, f"{shown(value)} is not a number")
        if not above < value <= maximum:
            raise self.error(
                name, f"{shown(value)} is not a number above {above:g} and up to {maximum:g}"
            )
        return float(value)

    def boolean(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if value is not default and not isinstance(value, bool):
            raise self.error(name, f"{shown(value)} is neither true nor false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self.error(name, f"{shown(value)} is not a text")
        return value

    def table(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return values by name."""
        value = self._get(name, default)
        if value is not default and not isinstance(value, Mapping):
            raise self.error(name, f"{shown(value)} is not a table of values by name")
        return value

    def section(self, name: str, default: Any = _REQUIRED) -> Fields:
        """Return a table as fields, which errors call ``name.field``."""
        prefix = f"{self._key(name)}."
        values = self.table(name, default)
        return self._of_the_same({prefix + key: values[key] for key in values}, prefix)

    def of_table(self, values: Mapping[str, Any], name: str) -> Fields:
        """Return ``values`` as fields that count as read entries of the table ``name``, and that
        errors call by their own names."""
        return self._of_the_same(values, within=f"{self._key(name)}.")

    def _of_the_same(self, values: Mapping[str, Any], prefix: str = "", within: str = "") -> Fields:
        fields = Fields(self.path, values, prefix)
        fields.asked, fields._within = self.asked, self._within + within
        return fields

    def entries(self, name: str, count: int | None = None) -> list[Any]:
        """Return the values of a list unchecked; ``count`` is how many there must be."""
        value = self._get(name, self._REQUIRED)
        if hasattr(value, "tolist"):  # an array of numpy's
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            raise self.error(name, f"{shown(value)} is not a list")
        if count is not None and len(value) != count:
            raise self.error(name, f"a list of {count} entries is needed, not of {len(value)}")
        return list(value)

    def has_list(self, name: str) -> bool:
        """Return whether a field is there and no single value: one for each layer, for instance."""
        return not isinstance(self.raw(name), (int, float, str, type(None)))

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; fast for a vocabulary."""
        entries = self.entries(name)
        if not set(map(type, entries)) <= {str}:
            raise self.error(name, "is not a list of texts")
        return entries

    def each(self, name: str, read: Callable[..., Any], count: int | None = None) -> list[Any]:
        """Return the entries of a list, each read by a method of this class (``Fields.number``)."""
        entries = self.entries(name, count)
        named = {f"{self._key(name)}[{i}]": entry for i, entry in enumerate(entries)}
        fields = self._of_the_same(named)
        return [read(fields, entry) for entry in named]

    def error(self, name: str, reason: str) -> ModelFileError:
        return ModelFileError(self.path, reason, field=f"{self._key(name):.200}")

    def _key(self, name: str) -> str:
        usual = self._prefix + name
        if name not in self._names:
            return usual
        own = self._prefix + self._names[name]
        return usual if self._values.get(own) is None and usual in self._values else own

    def _ask(self, name: str) -> Any:
        key = self._key(name)
        self.asked.add(self._within + key)
        if key != self._prefix + name and self._values.get(self._prefix + name) == (
            self._values.get(key)
        ):
            self.asked.add(self._within + self._prefix + name)  # the same value under two names
        return self._values.get(key)

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw(name, default)
        if value is self._REQUIRED:
            raise self.error(name, "is missing")
        return value


class GGUFFields(Fields):
    """Fields of a GGUF file, some of which only its ``tensors`` can answer."""

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        prefix: str,
        names: Mapping[str, str],
        tensors: Mapping[str, Any],
    ):
        super().__init__(path, values, prefix, names)
        self._tensors = tensors

    def num_rows(self, tensor: str) -> int:
        """Return the rows of a tensor; 0 if the file has none of this name."""
        found = self._tensors.get(tensor)
        return 0 if found is None else int(found.shape[0])

    def has_in_a_layer(self, tensor: str) -> bool:
        """Return whether any layer has a tensor such as ``attn_q.bias``."""
        return any(name.endswith(f".{tensor}") for name in self._tensors)
