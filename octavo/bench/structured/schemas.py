"""JSON schemas to measure with: made at random, and those of records whose text is mostly fixed.

The same number always gives the same schema.
"""

from __future__ import annotations

import random
from typing import Any

_NAMES = (
    *("id", "name", "title", "price", "is_active", "created at", "e-mail", "été", "tags"),
    *("shipping_address", "number_of_items", 'with "quotes"', "path/to"),
)
_PATTERNS = ("^[a-z]{2,6}$", "^[0-9]{3}-[0-9]{2}$", "^(ab|cd){1,3}$", "^[A-Z][a-z]+$")
_FORMATS = ("date", "time", "email", "ipv4", "uuid")
_WORDS = ("red", "green", "blue", "north", "south", "large", "small", "ünï", "a b c")


class _Maker:
    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        """Return the schema of an object, of at most three levels."""
        made = self._object(3)
        return {**made, "$defs": self._definitions} if self._definitions else made

    def _any(self, depth: int) -> dict[str, Any]:
        leaves = (self._string, self._number, self._enum, self._const, self._nothing)
        branches = (self._object, self._array, self._alternatives, self._reference)
        kinds = leaves + branches if depth > 0 else leaves
        return self._random.choice(kinds)(depth - 1)

    def _string(self, depth: int) -> dict[str, Any]:
        kind = self._random.randrange(3)
        if kind == 0:
            return {"type": "string", "pattern": self._random.choice(_PATTERNS), "maxLength": 12}
        if kind == 1:
            return {"type": "string", "format": self._random.choice(_FORMATS)}
        least = self._random.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + 8}

    def _number(self, depth: int) -> dict[str, Any]:
        least = self._random.randrange(-50, 50)
        kind = self._random.choice(("integer", "number"))
        return {"type": kind, "minimum": least, "maximum": least + self._random.randrange(10, 999)}

    def _enum(self, depth: int) -> dict[str, Any]:
        return {"enum": [*self._random.sample(_WORDS, 3), self._random.randrange(100)]}

    def _const(self, depth: int) -> dict[str, Any]:
        return {"const": self._random.choice((*_WORDS, 7, None, True, ["x", 1]))}

    def _nothing(self, depth: int) -> dict[str, Any]:
        return {"type": self._random.choice((["boolean", "null"], "boolean"))}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(_NAMES, self._random.randrange(1, 5))
        properties = {name: self._any(depth) for name in names}
        required = [name for name in names if self._random.random() < 0.7]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randrange(3)
        return {
            "type": "array",
            "items": self._any(min(depth, 1)),
            "minItems": least,
            "maxItems": least + 3,
        }

    def _alternatives(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._random.randrange(2, 4))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}  # the place of one that refers to others
        self._definitions[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}


def random_schema(number: int) -> dict[str, Any]:
    """Return a schema of what people ask for: objects of strings, numbers, choices and lists."""
    return _Maker(number).schema()


_FIELDS: dict[str, dict[str, Any]] = {
    "customer_first_name": {"type": "string", "maxLength": 12},
    "customer_last_name": {"type": "string", "maxLength": 12},
    "is_returning_customer": {"type": "boolean"},
    "number_of_ordered_items": {"type": "integer", "minimum": 1, "maximum": 99},
    "total_price_in_euros": {"type": "integer", "minimum": 1, "maximum": 9999},
    "shipping_country_code": {"type": "string", "pattern": "^[A-Z]{2}$"},
    "preferred_payment_method": {"enum": ["credit_card", "bank_transfer", "invoice"]},
    "estimated_delivery_date": {"type": "string", "format": "date"},
    "customer_satisfaction_rating": {"type": "integer", "minimum": 1, "maximum": 5},
    "requires_gift_wrapping": {"type": "boolean"},
}


def record_schema(number: int) -> dict[str, Any]:
    """Return the schema of a record with ten properties in some order, all required: more than a
    third of its text is their names."""
    names = random.Random(number).sample(sorted(_FIELDS), len(_FIELDS))
    return {
        "type": "object",
        "properties": {name: _FIELDS[name] for name in names},
        "required": names,
        "additionalProperties": False,
    }
