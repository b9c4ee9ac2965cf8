"""Each keyword of JSON Schema, by values that are valid and values that are not.

The values are those of another implementation, jsonschema: what it finds invalid is never allowed,
and what it finds valid is, but for the limits that docs/structured_output.md names.
"""

from __future__ import annotations

import json

import jsonschema
import pytest
from byte_tokens import EOS
from grammar_walks import COMPILER

from octavo.core.structured_outputs import StructuredOutputs

# Values for all schemas: of each type, with the edges of limits that are used below.
VALUES = [
    *(None, True, False, 0, 1, 2, 3, 5, -1, 2.5, 4.5, 10, "", "a", "ab", "abc", "xyz", "é\"\\"),
    *([], [1], [1, 2], [1, 1], ["a", 1], [1, "a"], ["a", "a", 1], [1, 2, 3], [True, False]),
    *([True, True], ["a", "b"], ["b", "a"], ["b", "b"], [None], [[1]], [5, 6], ["a", "b", "c"]),
    *({}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": "x", "b": "y"}, {"c": 1}),
    *({"a": 1, "b": 2, "c": 3}, {"ab": 1}, {"ab": "x"}, {"a": {"a": 1}}, {"k": "x", "v": 1}),
    *({"k": "y", "v": "s"}, {"k": "x", "v": "s"}, {"k": "z"}, {"a": None, "d": [1]}, {"d": 1}),
]  # fmt: skip

KIND = {"k": {"const": "x"}, "v": {"type": "integer"}}
OTHER = {"k": {"const": "y"}, "v": {"type": "string"}}
TREE = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}

SCHEMAS = {
    "not type": {"not": {"type": ["string", "object"]}},
    "not const": {"not": {"const": "a"}},
    "not number": {"not": {"const": 1}},
    "not list": {"not": {"const": [1, 2]}},
    "not object": {"not": {"const": {"a": 1}}},
    "not empty": {"not": {"enum": [[], {}, "", 0, None, False]}},
    "not enum": {"type": "string", "not": {"enum": ["a", "abc", "é\"\\"]}},
    "not required": {"type": "object", "not": {"required": ["a", "b"]}},
    "not minimum": {"not": {"minimum": 2}},
    "not exclusive": {"not": {"exclusiveMaximum": 2, "exclusiveMinimum": -1}},
    "not length": {"not": {"minLength": 1, "maxLength": 2}},
    "not properties": {"not": {"properties": {"a": {"type": "integer"}}}},
    "not items": {"not": {"items": {"type": "integer"}}},
    "not prefix": {"not": {"prefixItems": [{"const": 1}, {"const": 2}]}},
    "not size": {"not": {"minItems": 1, "maxItems": 2}},
    "not count": {"not": {"maxProperties": 1}},
    "not contains": {"not": {"contains": {"type": "string"}}},
    "not any": {"not": {"anyOf": [{"type": "object"}, {"enum": [1, "a"]}]}},
    "not all": {"not": {"allOf": [{"type": "object"}, {"required": ["a"]}]}},
    "not one": {"not": {"oneOf": [{"minimum": 2}, {"maximum": 3}]}},
    "not if": {"not": {"if": {"required": ["a"]}, "then": {"required": ["b"]}}},
    "not not": {"not": {"not": {"type": "string", "pattern": "^a"}}},
    "not ref": {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "array"}}},
    "not dependent": {"type": "object", "not": {"dependentRequired": {"a": ["b"]}}},
    "if then": {"if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
                "then": {"properties": {"v": {"type": "integer"}}}},
    "if cases": {"properties": {"k": {"enum": ["x", "y"]}, "v": {}, "a": {}}, "allOf": [
        {"if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["v"]}},
        {"if": {"properties": {"k": {"const": "y"}}, "required": ["k"]},
         "then": {"properties": {"v": {"type": "string"}}}, "else": {"required": ["a"]}}]},
    "if required": {"type": "object", "properties": {"k": {"enum": ["x", "y", "z"]}},
                    "required": ["k"], "if": {"properties": {"k": {"enum": ["x", "z"]}}},
                    "then": {"properties": {"v": {"type": "integer"}}},
                    "else": {"properties": {"v": {"const": "s"}}}},
    "if else": {"if": {"type": "object"}, "then": {"required": ["a"]}, "else": {"type": "array"}},
    "if only else": {"if": {"minimum": 2}, "else": {"enum": [0, "a", []]}},
    "oneOf types": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "oneOf kinds": {"oneOf": [
        {"type": "object", "properties": each, "required": ["k", "v"]} for each in (KIND, OTHER)]},
    "oneOf tags": {"oneOf": [{"type": "object", "properties": each} for each in (KIND, OTHER)]},
    "oneOf ranges": {"oneOf": [{"type": "number", "minimum": 2}, {"type": "number", "maximum": 3}]},
    "oneOf lengths": {"oneOf": [{"type": "string", "minLength": 2}, {"type": "string"}]},
    "oneOf enums": {"oneOf": [{"enum": [1, 2, "a"]}, {"enum": [2, 3, "a", []]}]},
    "oneOf required": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf refs": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}],
                   "$defs": {"a": {"type": "number", "minimum": 2}}},
    "contains": {"contains": {"type": "string"}},
    "contains bounded": {"type": "array", "contains": {"const": 1}, "maxItems": 2},
    "contains count": {"contains": {"const": "a"}, "minContains": 2, "maxContains": 2},
    "contains most": {"contains": {"type": "integer"}, "minContains": 0, "maxContains": 1},
    "contains none": {"contains": False},
    "unique enum": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
    "unique booleans": {"items": {"type": "boolean"}, "uniqueItems": True},
    "unique few": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True,
                   "maxItems": 1},
    "unique prefix": {"type": "array", "uniqueItems": True, "items": False,
                      "prefixItems": [{"type": "string"}, {"type": "integer"}]},
    "dependentRequired": {"dependentRequired": {"a": ["b"], "c": []}},
    "dependentSchemas": {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
    "dependent never": {"dependentSchemas": {"a": False}},
    "dependencies": {"dependencies": {"a": ["b"], "b": {"required": ["a"]}}},
    "propertyNames enum": {"propertyNames": {"enum": ["a", "b"]}},
    "propertyNames not": {"propertyNames": {"enum": ["a", "b", "c"], "not": {"const": "b"}}},
    "propertyNames length": {"propertyNames": {"maxLength": 1},
                             "additionalProperties": {"type": "integer"}},
    "propertyNames pattern": {"propertyNames": {"pattern": "^a"},
                              "properties": {"a": {"type": "integer"}, "b": {}}},
    "propertyNames never": {"propertyNames": False},
    "propertyNames patterns": {"propertyNames": {"enum": ["a", "ab"]},
                               "patternProperties": {"b": {"type": "string"}}},
    "unevaluatedProperties": {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}},
                              "unevaluatedProperties": False},
    "unevaluated schema": {"properties": {"a": {}}, "allOf": [{"required": ["a"]}],
                           "unevaluatedProperties": {"type": "integer"}},
    "unevaluated any": {"anyOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                                  {"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
                        "unevaluatedProperties": False},
    "unevaluated one": {"oneOf": [{"properties": {"a": {}}, "required": ["a"]},
                                  {"properties": {"c": {}}, "required": ["c"]}],
                        "unevaluatedProperties": False},
    "unevaluated if": {"if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
                       "then": {"properties": {"v": {}}}, "unevaluatedProperties": False},
    "unevaluated ref": {"$ref": "#/$defs/a", "properties": {"b": {}},
                        "unevaluatedProperties": False, "$defs": {"a": {"properties": {"a": {}}}}},
    "unevaluated dependent": {"dependentSchemas": {"a": {"properties": {"b": {}}}},
                              "properties": {"a": {}}, "unevaluatedProperties": False},
    "unevaluatedItems": {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    "unevaluated items any": {"anyOf": [{"prefixItems": [{"const": 1}]},
                                        {"prefixItems": [{"const": "a"}, {}]}],
                              "unevaluatedItems": False},
    "recursive": TREE,
    "anchor": {"items": {"$ref": "#a"}, "$defs": {"x": {"$anchor": "a", "type": "integer"}}},
    "id": {"$id": "http://x/y", "items": {"$ref": "z"},
           "$defs": {"z": {"$id": "z", "type": "string"}}},
    "dynamic": {"$dynamicAnchor": "n", "properties": {"a": {"$dynamicRef": "#n"}},
                "type": ["object", "integer"]},
    "counts": {"minItems": 1.0, "maxItems": 2.0, "maxProperties": 1.0, "minLength": 1.0},
    "odd names": {"properties": {"a": {"$ref": '#/$defs/q"%25'}},
                  "$defs": {'q"%': {"type": "integer"}}},
}  # fmt: skip

# What is valid, and not allowed all the same.
LIMITS = {
    # Properties come in the order of the schema, those of ``allOf`` and ``$ref`` behind the others.
    "unevaluatedProperties": [{"a": 1, "b": 2}, {"a": "x", "b": "y"}],
    "unevaluated ref": [{"a": 1, "b": 2}, {"a": "x", "b": "y"}],
    # The opposite of an integer is no number.
    "oneOf refs": [2.5, 4.5],
}


def is_allowed(schema, value):
    text = json.dumps(value, ensure_ascii=False).encode()
    tokens = [*text, EOS]
    return COMPILER.mask(StructuredOutputs(json=schema)).num_allowed(tokens) == len(tokens)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_allowed_is_what_is_valid(name):
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    if "dependencies" in schema:
        validator = jsonschema.Draft7Validator(schema)
    allowed = [value for value in VALUES if is_allowed(schema, value)]
    assert [value for value in allowed if not validator.is_valid(value)] == []
    valid = [value for value in VALUES if validator.is_valid(value)]
    assert 0 < len(valid) < len(VALUES)
    assert [value for value in valid if not is_allowed(schema, value)] == LIMITS.get(name, [])
