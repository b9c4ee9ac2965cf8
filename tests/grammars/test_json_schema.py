from __future__ import annotations

import json
import random

import pytest
from grammar_walks import accepts, allowed, mask, walk

from octavo.base.errors import ConstraintError
from octavo.grammars.json_schema import MAX_WHITESPACE
from octavo.grammars.number_runs import MAX_DIGITS


def refusal(schema, **options):
    with pytest.raises(ConstraintError) as error:
        mask(json=schema, **options)
    assert error.value.field == "structured_outputs.json"
    return error.value


ITEM = {"type": "object", "properties": {"a": {"x": {}, "type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"pattern": "a"}}, "not"),
        ({"if": {"properties": {"a": {"format": "date"}}}, "then": {"required": ["b"]}}, "if"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf"),
        ({"contains": {"multipleOf": 2}, "maxContains": 1}, "contains"),
        ({"contains": {}, "minContains": 100}, "contains"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"propertyNames": {"pattern": "a", "maxLength": 2}}, "propertyNames"),
        ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}, "propertyNames"),
        ({"contains": {"type": "null"}, "unevaluatedItems": False}, "unevaluatedItems"),
        ({"items": {"$id": "x:y", "$dynamicRef": "#"}}, "$dynamicRef"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
    ],
)
def test_a_keyword_that_is_not_supported_is_named_with_its_place(schema, keyword):
    place = "#/properties/a~1b/items/0"
    if keyword == "$dynamicRef":
        place += "/items"
    error = refusal({"$id": "x:z", "type": "object", "properties": {"a/b": {"items": [schema]}}})
    assert f"'{keyword}' at {place} is not supported" in str(error)
    assert error.reason == "unsupported"


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"not": {"properties": {"a": {"pattern": "x"}}}}, "'pattern' at #/not/properties/a"),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"format": "uri"}}},
         "'format' at #/$defs/a"),
    ],
)  # fmt: skip
def test_what_has_no_opposite_is_named_with_its_own_place(schema, part):
    assert f"there is no opposite of {part}" in str(refusal(schema))


@pytest.mark.parametrize(
    "nothing",
    [
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"then": {"type": "string"}},
        {"if": {"type": "string"}},
        {"minContains": 2},
        {"not": False},
        {"dependentRequired": {}},
        {"unevaluatedItems": True},
        {"propertyNames": {}},
        {"title": "x", "description": "y", "default": 1, "examples": [2], "deprecated": True},
    ],
)
def test_what_says_nothing_is_no_error(nothing):
    assert accepts(mask(json={"type": ["integer", "array"], "items": False, **nothing}), "12")


@pytest.mark.parametrize(
    ("schema", "part", "reason"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "#/properties/a/type", "invalid"),
        ("{", "line 1 column 2", "invalid"),
        ('{"minimum": NaN}', "NaN", "invalid"),
        (False, "false", "unsatisfiable"),
        ({"$ref": "#/$defs/a"}, "'#/$defs/a'", "invalid"),
        ({"items": {"type": "string", "pattern": "a("}}, "#/items: unclosed group", "invalid"),
        ({"$ref": "#x"}, "#/$ref: there is no '#x'", "invalid"),
        ({"items": {"pattern": "(?=a)"}}, "#/items: look-around", "unsupported"),
        ({"items": {"format": "colour"}}, "'colour' at #/items", "unsupported"),
        ({"minProperties": 3, "type": "object"}, "minProperties above 1 at #", "unsupported"),
        ({"properties": {"a": 3}}, "#/properties/a no schema", "invalid"),
        (
            {"type": "object", "required": ["b"], "properties": {
                "a": {}, "b": {"type": "integer", "minimum": 5, "maximum": 3}}},
            "#/properties/b: ", "unsatisfiable",
        ),
        ({"type": "string", "enum": [1]}, "no text can satisfy it", "unsatisfiable"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no text", "unsatisfiable"),
        (
            {"$defs": {"a": {"type": "object", "required": ["a"], "properties": {
                "a": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
            "refers to itself without end", "unsatisfiable",
        ),
        ("[" * 70 + "]" * 70, "nested", "too_complex"),
        ('{"items":' * 10_000 + "{}" + "}" * 10_000, "nested", "too_complex"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(schema, part, reason):
    error = refusal(schema)
    assert part in str(error)
    assert error.reason == reason


@pytest.mark.parametrize(
    ("schema", "whole", "other"),
    [
        ({"type": "object", "propertyNames": {"pattern": "^a"},
          "additionalProperties": {"type": "integer"}}, '{"ab":1}', '{"b":1}'),
        ({"type": "object", "propertyNames": {"enum": ["a", "b."]}}, '{"b.":1}', '{"bc":1}'),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"],
          "dependentRequired": {"a": ["b"]}}, '{"a":1,"b":2}', '{"a":1}'),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
         '{"a":1}', '{"b":1}'),
        ({"type": "integer", "format": "int32"}, "2147483647", "2147483648"),
        ({"type": "string", "format": "byte"}, '"YWI="', '"YWI"'),
        ({"type": "string", "format": "password"}, '"x"', "x"),
    ],
)  # fmt: skip
def test_what_can_be_said_in_other_words_is(schema, whole, other):
    assert accepts(mask(json=schema), whole)
    assert not accepts(mask(json=schema), other)


def test_large_integers_are_not_rounded():
    assert "no double" in str(refusal({"type": "integer", "const": 9007199254740993}))
    assert "64 bits" in str(refusal({"type": "integer", "minimum": 10**20}))
    followed = {"type": "integer", "minimum": 9007199254740993}
    assert not accepts(mask(json=followed), "9007199254740992")
    assert accepts(mask(json=followed), "9007199254740994")
    # As an integer it would be the largest of 64 bits.
    either = {"anyOf": [{"allOf": [{"type": "integer"}, {"const": 1e20}]}, {"type": "null"}]}
    assert not accepts(mask(json=either), str(2**63 - 1))


def test_values_of_an_enum_are_those_that_the_other_keywords_allow():
    schema = {"enum": [1, 2.5, "a", "ab", [], [1]], "type": ["integer", "string", "array"],
              "minimum": 2, "maxLength": 1, "minItems": 1}  # fmt: skip
    assert accepts(mask(json=schema), '"a"') and accepts(mask(json=schema), "[1]")
    for text in ("1", "2.5", '"ab"', "[]"):
        assert not accepts(mask(json=schema), text)


def test_a_name_is_not_spelled_in_codes_of_characters():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(mask(json=schema), '{"a":1,"b\\n":"x"}')
    for name in ("a", "\\u0061"):
        assert not accepts(mask(json=schema), f'{{"{name}":"x"}}')


def test_white_space_between_parts_has_a_bound():
    schema = {"type": "array", "items": {"type": "string"}}
    spaces = " " * MAX_WHITESPACE
    assert accepts(mask(json=schema), f'[{spaces}"a"]')
    assert not accepts(mask(json=schema), f'[{spaces} "a"]')
    assert accepts(mask(json=schema, is_bounded=False), f'[{spaces} "a"]')
    assert accepts(mask(json=schema), f'["{spaces} "]')  # a text has none
    assert not accepts(mask(json=schema, disable_any_whitespace=True), '[ "a"]')
    assert accepts(mask(json=schema, whitespace_pattern="[ ]{1,2}"), '[  "a"]')
    assert not accepts(mask(json=schema, whitespace_pattern="[ ]{1,2}"), '[   "a"]')


def test_digits_of_numbers_have_a_bound():
    digits = "1" * MAX_DIGITS
    for schema in ({"type": "integer"}, {"type": "number"}):
        assert accepts(mask(json=schema), digits)
        assert not accepts(mask(json=schema), digits + "1")
        assert accepts(mask(json=schema, is_bounded=False), digits + "1")
    assert accepts(mask(json={"type": "number"}), f"0.{digits}e12")
    assert accepts(mask(json={"type": "string"}), f'"{digits}11"')
    assert accepts(mask(json={"type": "array"}), f'["\\"{digits}1", {digits}]')
    # What a schema asks for comes all the same.
    assert accepts(mask(json={"const": 1e40}), "1" + "0" * 40)


def test_digits_have_a_bound_after_a_thought_and_in_tags_too():
    digits = "1" * MAX_DIGITS
    later = {"json": {"type": "integer"}, "begins_after": "#"}
    assert accepts(mask(**later), f"{digits}11#{digits}")
    assert not accepts(mask(**later), f"#{digits}1")
    tags = {"structures": [{"begin": "<t>", "schema": {"type": "integer"}, "end": "</t>"}],
            "triggers": ["<t>"]}  # fmt: skip
    assert accepts(mask(structural_tag=tags), f"{digits}11<t>{digits}</t>{digits}11")
    assert not accepts(mask(structural_tag=tags), f"<t>{digits}1</t>")


def test_the_bound_of_digits_follows_what_is_taken_back():
    followed = mask(json={"type": "integer"})
    followed.advance(b"1" * MAX_DIGITS)
    assert not allowed(followed) & set(b"0123456789")
    copy = followed.fork()
    followed.rollback(1)
    assert allowed(followed) >= set(b"0123456789")
    assert not allowed(copy) & set(b"0123456789")


@pytest.mark.parametrize("seed", range(10))
def test_a_random_model_ends_numbers_and_white_space(seed):
    schema = {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}
    text = walk(mask(json=schema), random.Random(seed), 2000)
    assert len(json.loads(text)) == 3


NESTED = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "whole", "other"),
    [
        ({"type": "object", "properties": {"a": NESTED}}, '{"a":{"b":1}}', '{"a":{"c":1}}'),
        ({"type": "array", "items": NESTED}, '[{"b":1}]', '[{"c":1}]'),
        ({"type": "object"}, "{}", '{"a":1}'),
        ({"anyOf": [NESTED, {"type": "null"}]}, '{"b":1}', '{"c":1}'),
        ({"type": "object", "properties": {"a": {}}, "allOf": [NESTED]},
         '{"a":1,"b":2}', '{"c":1}'),
        ({"allOf": [NESTED, {"properties": {"c": {}}}]}, '{"b":1,"c":2}', '{"d":1}'),
        ({"$ref": "#/$defs/n", "$defs": {"n": NESTED}}, '{"b":1}', '{"c":1}'),
    ],
)  # fmt: skip
def test_objects_can_be_closed_where_the_schema_does_not_say(schema, whole, other):
    assert accepts(mask(json=schema, disable_additional_properties=True), whole)
    assert not accepts(mask(json=schema, disable_additional_properties=True), other)
    assert accepts(mask(json=schema), other)
    said = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert accepts(mask(json=said, disable_additional_properties=True), '{"x":1}')
