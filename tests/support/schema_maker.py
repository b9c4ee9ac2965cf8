"""Random JSON schemas of the keywords that are supported, and random answers to them."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("a", "name", "is ok", "été", 'q"uote', "x/y", "n~1", "long_property_name")
_PATTERNS = (
    "^[a-z]{2,5}$",
    "^\\d{3}-\\d{2}$",
    "^(ab|cd)+$",
    "x",
    '^[A-Z][^"\\\\]*$',
    "^\\w+@\\w+$",
)
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "hostname", "duration", "uri")


class SchemaMaker:
    """Makes schemas that some value satisfies, of at most so many levels."""

    def __init__(self, seed: int, depth: int = 3):
        self.random = random.Random(seed)
        self._depth = depth
        self._definitions: dict[str, Any] = {}
        self._count = 0

    def schema(self) -> dict[str, Any]:
        made = self._any(self._depth)
        return {**made, "$defs": self._definitions} if self._definitions else made

    def _any(self, depth: int) -> dict[str, Any]:
        leaves = [self._string, self._integer, self._number, self._enum, self._const, self._type]
        branches = [self._object, self._object, self._array, self._any_of, self._reference,
                    self._all_of, self._names, self._free_object]  # fmt: skip
        return self.random.choice(leaves + branches if depth else leaves)(depth - 1)

    def _some(self, **fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if self.random.random() < 0.5}

    def _string(self, depth: int) -> dict[str, Any]:
        kind = self.random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self.random.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.random.choice(_FORMATS)}
        least = self.random.randrange(4)
        most = least + self.random.randrange(6)
        return {"type": "string", **self._some(minLength=least, maxLength=most)}

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self.random.randrange(-1000, 1000)
        limits = self._some(minimum=low, maximum=low + self.random.randrange(50, 5000))
        if self.random.random() < 0.2:
            limits["multipleOf"] = self.random.choice([2, 5, 7])
        return {"type": "integer", **limits}

    def _number(self, depth: int) -> dict[str, Any]:
        low = round(self.random.uniform(-100, 100), 2)
        kinds = self.random.choice(
            [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]
        )
        return {"type": "number", **self._some(**{kinds[0]: low, kinds[1]: low + 10.5})}

    def _enum(self, depth: int) -> dict[str, Any]:
        values: list[Any] = ["yes", "no", 'é"\\\n', 1, -2.5, True, None, {"k": [1]}, []]
        return {"enum": self.random.sample(values, self.random.randrange(1, 5))}

    def _const(self, depth: int) -> dict[str, Any]:
        return {"const": self.random.choice(["fixed", 0, False, None, {"a": {"b": 1}}, [1, "2"]])}

    def _type(self, depth: int) -> dict[str, Any]:
        kinds = self.random.sample(["boolean", "null", "integer", "string"], 2)
        return {"type": self.random.choice([*kinds, kinds])}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(_NAMES, self.random.randrange(1, 5))
        made: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": [name for name in names if self.random.random() < 0.6],
            "additionalProperties": False,
        }
        rest = self.random.random()
        if rest < 0.15:
            made["additionalProperties"] = self._any(0)
        elif rest < 0.3:
            made["patternProperties"] = {"^z_": self._any(0)}
        return made

    def _free_object(self, depth: int) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self._any(depth),
                **self._some(minProperties=1, maxProperties=2)}  # fmt: skip

    def _names(self, depth: int) -> dict[str, Any]:
        names = self.random.choice([{"pattern": "^[a-c]{2}$"}, {"enum": ["one", "two"]}])
        return {"type": "object", "propertyNames": names, "additionalProperties": self._any(depth)}

    def _array(self, depth: int) -> dict[str, Any]:
        least = self.random.randrange(3)
        made: dict[str, Any] = {"type": "array", "items": self._any(depth)}
        made |= self._some(minItems=least, maxItems=least + self.random.randrange(3))
        if self.random.random() < 0.3:
            made["prefixItems"] = [self._any(depth) for _ in range(self.random.randrange(1, 3))]
            made.pop("maxItems", None)
            if self.random.random() < 0.5:
                made["items"] = False
                made.pop("minItems", None)
        return made

    def _any_of(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.3:
            return {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}
        return {"anyOf": [self._any(depth) for _ in range(self.random.randrange(1, 4))]}

    def _all_of(self, depth: int) -> dict[str, Any]:
        first, second = self.random.sample(("a", "b", "c"), 2)
        return {
            "allOf": [
                {"type": "object", "properties": {first: self._any(0)}, "required": [first]},
                {"properties": {second: self._any(0)}},
            ]
        }

    def _reference(self, depth: int) -> dict[str, Any]:
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
