"""`SchemaDocument`: a JSON schema as it was sent, with the places of its parts and its references.

A place is a JSON pointer from the root, such as ``#/properties/a``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import MAX_DEPTH
from octavo.grammars.schema_shapes import check_keywords

Schema = dict[str, Any]

# Keywords whose value is a schema, a list of schemas, or schemas by a name.
SINGLE = ("additionalProperties", "items", "additionalItems", "unevaluatedProperties", "not", "if",
          "then", "else", "contains", "propertyNames", "unevaluatedItems")  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
DEFINITIONS = ("$defs", "definitions")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_COMBINATIONS = frozenset(
    ("allOf", "oneOf", "not", "if", "contains", "uniqueItems", "dependentRequired",
     "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
     "patternProperties")
)  # fmt: skip
_ALTERNATIVES = frozenset(("anyOf", *REFERENCES))  # combinations beside other keywords
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly",
     "writeOnly", "$schema", "$id", "$anchor", "$defs", "definitions")
)  # fmt: skip
# Drafts in which a schema with a reference is that reference and nothing else.
_LONE_REFERENCES = ("draft-03", "draft-04", "draft-06", "draft-07")


class SchemaDocument:
    """A schema and those in it, which become this object's own.

    Raises:
        ConstraintError: it is no schema, or nested too deep.
    """

    def __init__(self, root: Any):
        _check_depth(root)
        if root is False:
            message = "the schema is false, which nothing satisfies"
            raise ConstraintError(message, None, "unsatisfiable")
        if root is True:
            root = {}
        if not isinstance(root, dict):
            raise ConstraintError(f"must be a JSON schema, an object, not {root!r:.60}")
        self.root: Schema = root
        draft = str(root.get("$schema", ""))
        self.has_lone_references = any(each in draft for each in _LONE_REFERENCES)
        self._places: dict[int, str] = {}  # of parts, by their id
        self.has_combinations = False  # whether several schemas may hold for one value
        self._named: dict[str, Any] = {}  # parts by the URIs that their names make
        self._index(root, "#", "")

    def place_of(self, part: Any, otherwise: str) -> str:
        return self._places.get(id(part), otherwise)

    def referred(self, part: Schema, place: str) -> tuple[Any, str]:
        """Return what a schema refers to by ``$ref``, ``$dynamicRef`` or ``$recursiveRef``, and its
        place.

        Raises:
            ConstraintError: it is not in the schema.
        """
        keyword = next(key for key in REFERENCES if key in part)
        reference = part[keyword]
        if isinstance(reference, str):
            address, fragment = urldefrag(reference)
            resource = self._named.get(address, self.root if not address else None)
            if not fragment and resource is not None:
                return resource, self.place_of(resource, "#")
            if fragment.startswith("/") and resource is not None:
                base = self.place_of(resource, "#")
                found, ok = _stepped(resource, fragment)
                if ok:
                    where = self.place_of(found, f"{base}{fragment}")
                    self._index(found, where, address)
                    return found, where
            elif f"{address}#{fragment}" in self._named:
                found = self._named[f"{address}#{fragment}"]
                return found, self.place_of(found, reference)
        raise ConstraintError(f"{place}/{keyword}: there is no {reference!r:.100} in the schema")

    def is_plain_dynamic(self) -> bool:
        """Return whether dynamic references mean what others do: there is one resource alone."""
        return len({urldefrag(each)[0] for each in self._named}) <= 1

    def _index(self, part: Any, place: str, base: str) -> None:
        waiting = [(place, part, base)]
        while waiting:
            place, part, base = waiting.pop()
            if isinstance(part, bool) or id(part) in self._places:
                continue
            if not isinstance(part, dict):
                raise ConstraintError(f"has at {place} no schema: {part!r:.60}")
            check_keywords(part, place)
            name = part.get("$id")
            if isinstance(name, str) and not (self.has_lone_references and "$ref" in part):
                address, fragment = urldefrag(_joined(base, name))
                if name.startswith("#"):
                    self._named.setdefault(f"{base}#{fragment}", part)
                else:
                    base = address
                    self._named.setdefault(base, part)
            for anchor in ("$anchor", "$dynamicAnchor"):
                if isinstance(part.get(anchor), str):
                    self._named.setdefault(f"{base}#{part[anchor]}", part)
            for key in REFERENCES:
                if isinstance(part.get(key), str):
                    part[key] = _joined(base, part[key])
            self._places[id(part)] = place
            beside = part.keys() - ANNOTATIONS
            self.has_combinations |= bool(beside & _COMBINATIONS) or (
                bool(beside & _ALTERNATIVES) and len(beside) > 1
            )
            below = [*parts_of(part, place)]
            for key in DEFINITIONS:
                below += _parts_by_name(part, key, place)
            waiting += ((where, each, base) for where, each in below)


def schema_at(text: str, begin: int = 0) -> tuple[Any, int]:
    """Return the schema that begins at a place of a text, not checked, and where it ends.

    Raises:
        ConstraintError: it is no JSON.
    """
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    try:
        found: tuple[Any, int] = decoder.raw_decode(text, begin)
        return found
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ConstraintError(f"is no JSON: {error}") from None


def parts_of(part: Schema, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas just below one, with their places, but for its definitions."""
    for key in SINGLE:
        if key in part and (key != "items" or not isinstance(part[key], list)):
            yield f"{place}/{key}", part[key]
    for key in LISTS:
        if isinstance(part.get(key), list):
            yield from ((f"{place}/{key}/{i}", each) for i, each in enumerate(part[key]))
    for key in MAPS:
        yield from _parts_by_name(part, key, place)


def _parts_by_name(part: Schema, key: str, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(part.get(key), dict):
        for name, each in part[key].items():
            if key != "dependencies" or not isinstance(each, list):
                yield f"{place}/{key}/{pointed(name)}", each


def pointed(key: str) -> str:
    """Return a key as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _stepped(found: Any, pointer: str) -> tuple[Any, bool]:
    """Follow a JSON pointer; returns what is there, and whether anything is."""
    for step in pointer.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None, False
    return found, True


def _joined(base: str, reference: str) -> str:
    if not base or reference.startswith("urn:"):
        return reference
    if reference.startswith("#"):
        return base + reference
    return urljoin(base, reference)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for each in level:
            below += each.values() if isinstance(each, dict) else each
        level = [each for each in below if isinstance(each, dict | list)]


def _too_deep() -> ConstraintError:
    return ConstraintError(f"is nested more than {MAX_DEPTH} deep", None, "too_complex")
