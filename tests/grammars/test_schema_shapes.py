"""Whatever is sent as a schema is read or refused with its place, in bounded time."""

from __future__ import annotations

import json
import random

import pytest

from octavo.base.errors import ConstraintError
from octavo.bench.structured.varied_schemas import varied_schema
from octavo.grammars.json_schema import parse_schema, reachable


@pytest.mark.parametrize(
    ("keyword", "value", "what"),
    [
        ("minLength", "x", "whole number"),
        ("maxItems", 1.5, "whole number"),
        ("minContains", -1, "whole number"),
        ("minimum", "1", "number"),
        ("maximum", True, "number"),
        ("multipleOf", 0, "number above 0"),
        ("enum", 3, "list"),
        ("required", "a", "list of names"),
        ("required", [1], "list of names"),
        ("pattern", 3, "text"),
        ("$ref", {}, "text"),
        ("uniqueItems", "yes", "true or false"),
        ("properties", [], "object"),
        ("dependentRequired", {"a": "b"}, "object of lists of names"),
        ("type", {"a": 1}, "type"),
    ],
)
def test_a_value_that_a_keyword_cannot_have_is_named_with_its_place(keyword, value, what):
    with pytest.raises(ConstraintError) as error:
        parse_schema(json.dumps({"items": {keyword: value}}))
    assert f"#/items/{keyword} {value!r}, which is no {what}" in str(error.value)


@pytest.mark.parametrize("keyword", ["not", "if", "items", "contains", "propertyNames"])
def test_what_is_no_schema_is_named_with_its_place(keyword):
    for value in (None, 3, "x"):
        with pytest.raises(ConstraintError, match=f"has at #/{keyword} no schema"):
            parse_schema(json.dumps({keyword: value}))
    with pytest.raises(ConstraintError, match="has at #/anyOf/1 no schema"):
        parse_schema(json.dumps({"anyOf": [{}, [keyword]]}))


KEYWORDS = (
    *("type", "const", "enum", "minimum", "exclusiveMinimum", "multipleOf", "minLength", "pattern"),
    *("format", "required", "properties", "patternProperties", "additionalProperties", "items"),
    *("minProperties", "prefixItems", "maxItems", "allOf", "anyOf", "oneOf", "not", "if", "then"),
    *("else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired", "$id"),
    *("dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "$anchor"),
    *("unevaluatedItems", "$ref", "$dynamicRef", "$schema", "$defs", "additionalItems"),
)
STRANGE = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2.5,
        1e300,
        10**400,
        "",
        "a",
        "#",
        "#/x",
        "#/$defs/d1",
        "[",
        "(",
    ),
    *("\ud800", [], ["a"], [1], [[]], [{}], [True], [False], {}, {"a": 1}, {"a": ["b"]}, {"a": {}}),
    *({"a": False}, {"const": 1}, {"$ref": "#"}, {"not": {"$ref": "#"}}, ["string", "null"]),
    *("integer", [{"type": "integer"}, {"minimum": 2}]),
)


def damage(schema, rng):
    """Put something odd at some places of a schema."""
    for _ in range(rng.randrange(1, 4)):
        place = schema
        while rng.random() < 0.6:
            values = place.values() if isinstance(place, dict) else place
            below = [each for each in values if isinstance(each, dict | list) and each]
            if not below:
                break
            place = rng.choice(below)
        value = json.loads(json.dumps(rng.choice(STRANGE)))
        if isinstance(place, dict):
            place[rng.choice(KEYWORDS)] = value
        else:
            place[rng.randrange(len(place))] = value


def test_damaged_schemas_are_read_or_refused():
    num_read = 0
    for seed in range(600):
        schema = varied_schema(seed)
        damage(schema, random.Random(seed))
        try:
            parsed = parse_schema(json.dumps(schema), closes_objects=seed % 2 == 0)
        except ConstraintError:
            continue
        assert json.dumps(parsed.schema) and list(reachable(parsed))
        num_read += 1
    assert 40 < num_read < 550


def chain(length, make):
    return {f"a{i}": make({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)} | {
        f"a{length}": {"type": "string"}
    }


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"$ref": "#/$defs/a0"}, "$defs": chain(3000, dict)}, "unsupported"),
        ({"not": {"$ref": "#/$defs/a0"}, "$defs": chain(20, lambda s: {"anyOf": [s] * 10})},
         "too_complex"),
        ({"oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/a1"}],
          "$defs": chain(20, lambda s: {"oneOf": [s] * 10})}, "too_complex"),
        ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(3)]}
                    for i in range(6)], "unevaluatedProperties": False}, "too_complex"),
        ({"oneOf": [{"type": "object", "required": [f"k{i}"]} for i in range(300)]}, "too_complex"),
        ({"not": {"$ref": "#"}}, "unsatisfiable"),
    ],
)  # fmt: skip
def test_what_would_be_endless_is_refused(schema, reason):
    with pytest.raises(ConstraintError) as error:
        parse_schema(json.dumps(schema))
    assert error.value.reason == reason


def test_many_alternatives_of_a_kind_each_are_no_problem():
    kinds = [
        {"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(500)
    ]
    assert len(parse_schema(json.dumps({"oneOf": kinds})).schema["anyOf"]) == 500


def test_patterns_of_names_take_no_endless_time():
    names = {"enum": ["a" * 40 + "b", "a" * 40], "pattern": "^(a+)+$"}
    parsed = parse_schema(json.dumps({"propertyNames": names}))
    assert list(parsed.schema["properties"]) == ["a" * 40]
