"""`SchemaMaker`, which makes JSON schemas of all keywords to check answers by.

They are odder than what people ask for: each keyword comes beside others. The same number always
gives the same schema.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = (
    *("a", "name", "is ok", "été", 'q"uote', "x/y", "n~1", "long_property_name", "日本", "😀 key"),
    *("back\\slash", "tab\there", "", "$ref", "z_last"),
)
_PATTERNS = (
    *("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(ab|cd)+$", "x", '^[A-Z][^"\\\\]*$', "^\\w+@\\w+$"),
    *("^[^a-z]{1,4}$", "(?i)^yes|no$", "^.{3}$", "^[éü日]{1,3}$", "\\.txt$"),
)
_FORMATS = (
    *("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration", "uri"),
    *("json-pointer", "idn-email", "iri", "byte", "int32"),
)
_WORDS = ("red", "green", "blue", "dark red", "vert é", "")
_VALUES: tuple[Any, ...] = (
    *("yes", "no", 'é"\\\n', 1, -2.5, 0, 1e20, True, False, None, {"k": [1]}, [], {}, [1, "2"]),
)


class SchemaMaker:
    """Makes schemas of at most so many levels. Nearly all are satisfied by some value."""

    def __init__(self, seed: int, depth: int = 3):
        self.random = random.Random(seed)
        self._depth = depth
        self._definitions: dict[str, Schema] = {}
        self._count = 0

    def schema(self) -> Schema:
        """Return the next schema, with the definitions that it refers to."""
        made = self._any(self._depth)
        return {**made, "$defs": self._definitions} if self._definitions else made

    def _any(self, depth: int) -> Schema:
        kinds: list[Callable[[int], Schema]]
        kinds = [self._string, self._integer, self._number, self._enum, self._const, self._type]
        if depth:
            kinds += [self._object, self._object, self._array, self._any_of, self._reference,
                      self._all_of, self._names, self._free_object, self._one_of, self._if,
                      self._not, self._contains, self._unique, self._dependent,
                      self._unevaluated]  # fmt: skip
        return self.random.choice(kinds)(depth - 1)

    def _leaf(self) -> Schema:
        return self._any(0)

    def _some(self, **fields: Any) -> Schema:
        return {name: value for name, value in fields.items() if self.random.random() < 0.5}

    # -- one value ---------------------------------------------------------------------------

    def _string(self, depth: int) -> Schema:
        kind = self.random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self.random.choice(_PATTERNS)}
        if kind == 1:
            name = self.random.choice(_FORMATS)
            return {"type": "integer" if name == "int32" else "string", "format": name}
        least = self.random.randrange(4)
        most = least + self.random.randrange(6)
        return {"type": "string", **self._some(minLength=least, maxLength=most)}

    def _integer(self, depth: int) -> Schema:
        low = self.random.randrange(-1000, 1000)
        limits = self._some(minimum=low, maximum=low + self.random.randrange(50, 5000))
        if self.random.random() < 0.2:
            limits["multipleOf"] = self.random.choice([2, 5, 7])
        return {"type": "integer", **limits}

    def _number(self, depth: int) -> Schema:
        low = round(self.random.uniform(-100, 100), 2)
        kinds = self.random.choice(
            [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]
        )
        made = {"type": "number", **self._some(**{kinds[0]: low, kinds[1]: low + 10.5})}
        if self.random.random() < 0.2:
            made["multipleOf"] = self.random.choice([0.5, 0.25, 0.01, 3])
        return made

    def _enum(self, depth: int) -> Schema:
        return {"enum": self.random.sample(_VALUES, self.random.randrange(1, 5))}

    def _const(self, depth: int) -> Schema:
        return {"const": self.random.choice((*_VALUES, {"a": {"b": 1}}))}

    def _type(self, depth: int) -> Schema:
        kinds = self.random.sample(["boolean", "null", "integer", "string", "number"], 2)
        return {"type": self.random.choice([*kinds, kinds])}

    # -- objects -----------------------------------------------------------------------------

    def _object(self, depth: int) -> Schema:
        names = self.random.sample(_NAMES, self.random.randrange(1, 5))
        made: Schema = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": [name for name in names if self.random.random() < 0.6],
            "additionalProperties": False,
        }
        rest = self.random.random()
        if rest < 0.15:
            made["additionalProperties"] = self._leaf()
        elif rest < 0.3:
            made["patternProperties"] = {"^z_": self._leaf()}
        elif rest < 0.4:
            del made["additionalProperties"]
        return made

    def _free_object(self, depth: int) -> Schema:
        return {"type": "object", "additionalProperties": self._any(depth),
                **self._some(minProperties=1, maxProperties=2)}  # fmt: skip

    def _names(self, depth: int) -> Schema:
        names = self.random.choice(
            [{"pattern": "^[a-c]{2}$"}, {"enum": ["one", "two"]}, {"minLength": 2, "maxLength": 5}]
        )
        return {"type": "object", "propertyNames": names, "additionalProperties": self._any(depth)}

    def _dependent(self, depth: int) -> Schema:
        made = self._small_object()
        if self.random.random() < 0.5:
            return {**made, "dependentRequired": {"a": ["b"]}}
        return {**made, "dependentSchemas": {"a": {"properties": {"b": self._leaf()}}}}

    def _unevaluated(self, depth: int) -> Schema:
        return {
            "allOf": [{"type": "object", "properties": {"a": self._leaf()}, "required": ["a"]}],
            "properties": {"b": self._leaf()},
            "unevaluatedProperties": False,
        }

    def _small_object(self) -> Schema:
        return {
            "type": "object",
            "properties": {name: self._leaf() for name in "abc"},
            **self._some(required=["a"], additionalProperties=False),
        }

    # -- lists -------------------------------------------------------------------------------

    def _array(self, depth: int) -> Schema:
        least = self.random.randrange(3)
        made: Schema = {"type": "array", "items": self._any(depth)}
        made |= self._some(minItems=least, maxItems=least + self.random.randrange(3))
        if self.random.random() < 0.3:
            made["prefixItems"] = [self._any(depth) for _ in range(self.random.randrange(1, 3))]
            made.pop("maxItems", None)
            if self.random.random() < 0.5:
                made["items"] = False
                made.pop("minItems", None)
        return made

    def _contains(self, depth: int) -> Schema:
        made: Schema = {"type": "array", "items": {"type": ["integer", "string"]},
                "contains": self._leaf(), **self._some(maxItems=3)}  # fmt: skip
        if self.random.random() < 0.3:
            made |= {"contains": {"const": "x"}, "minContains": 2, "maxContains": 3}
        return made

    def _unique(self, depth: int) -> Schema:
        items = self.random.choice([{"enum": list(_WORDS)}, {"type": "boolean"}, {"enum": [1, 2]}])
        return {"type": "array", "items": items, "uniqueItems": True,
                **self._some(minItems=1, maxItems=2)}  # fmt: skip

    # -- several schemas for one value -------------------------------------------------------

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self.random.randrange(1, 4))]}

    def _one_of(self, depth: int) -> Schema:
        kind = self.random.randrange(4)
        if kind == 0:
            return {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}
        if kind == 1:
            return {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 9}]}
        if kind == 2:
            return {"oneOf": [self._leaf(), self._leaf()]}
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": word}, "value": self._any(depth)},
                    "required": ["kind", "value"],
                }
                for word in _WORDS[:3]
            ]
        }

    def _if(self, depth: int) -> Schema:
        condition = self.random.choice(
            [{"properties": {"a": {"const": "yes"}}, "required": ["a"]}, {"required": ["b"]}]
        )
        return {
            **self._small_object(),
            "properties": {"a": {"enum": ["yes", "no", 1]}, "b": self._leaf(), "c": {}},
            "if": condition,
            **self._some(then={"properties": {"c": {"type": "integer"}}, "required": ["c"]}),
            "else": {"properties": {"c": {"type": "string", "maxLength": 5}}},
        }

    def _not(self, depth: int) -> Schema:
        others = self.random.choice(
            [
                {"type": self.random.sample(["string", "object", "array", "null", "boolean"], 2)},
                {"enum": list(_WORDS)},
                {"const": self.random.choice([0, "red", True, None, [], {}])},
                {"required": ["a"]},
                {"minimum": 5},
                {"maxLength": 2},
                {"properties": {"a": {"type": "integer"}}},
                {"anyOf": [{"type": "number"}, {"enum": ["x", "xy"]}]},
            ]
        )
        kind: Schema = self.random.choice([{}, {"type": "string"}, {"type": ["integer", "object"]}])
        return {**kind, "not": others}

    def _all_of(self, depth: int) -> Schema:
        first, second = self.random.sample(("a", "b", "c"), 2)
        return {
            "allOf": [
                {"type": "object", "properties": {first: self._leaf()}, "required": [first]},
                {"properties": {second: self._leaf()}},
            ]
        }

    def _reference(self, depth: int) -> Schema:
        if self._definitions and self.random.random() < 0.5:
            return {"$ref": f"#/$defs/{self.random.choice(list(self._definitions))}"}
        self._count += 1
        name = f"d{self._count}"
        made = self._any(depth)
        if self.random.random() < 0.4:  # a list of its own kind
            made = {"type": "object", "additionalProperties": False, "properties": {
                "value": made, "next": {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]},
            }, "required": ["value"]}  # fmt: skip
        self._definitions[name] = made
        return {"$ref": f"#/$defs/{name}"}


def varied_schema(number: int) -> Schema:
    """Return a schema of some of the keywords of JSON Schema."""
    return SchemaMaker(number).schema()
