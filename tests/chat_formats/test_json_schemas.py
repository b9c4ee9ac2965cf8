from __future__ import annotations

import re

import pytest

from octavo.chat_formats.json_schemas import (
    arguments_of,
    closed,
    resolved,
    types_of,
    without_annotations,
    without_backtracking,
)
from octavo.chat_formats.tools import Tool


def test_annotations_go_and_properties_of_their_names_stay():
    schema = {
        "description": "D",
        "properties": {"description": {"type": "string", "title": "T", "default": ""}},
        "anyOf": [{"title": "T"}],
        "enum": [{"title": "T"}],
    }
    assert without_annotations(schema) == {
        "properties": {"description": {"type": "string"}},
        "anyOf": [{}],
        "enum": [{"title": "T"}],
    }


def test_patterns_that_need_backtracking_can_go():
    schema = {"items": {"pattern": "(?=a)b"}, "properties": {"a": {"pattern": "(?:a)b"}}}
    assert without_backtracking(schema) == {
        "items": {},
        "properties": {"a": {"pattern": "(?:a)b"}},
    }


def test_objects_are_closed_where_nothing_else_could_be_missed():
    inner = {"type": "object", "properties": {"a": {}}}
    is_closed = {**inner, "additionalProperties": False}
    assert closed(inner) == is_closed
    assert closed({"items": inner}) == {"items": is_closed}
    assert closed({"properties": {"b": inner}})["properties"] == {"b": is_closed}
    for open_on_purpose in (
        {"type": "object"},
        {**inner, "additionalProperties": True},
        {**inner, "required": ["b"]},
        {"allOf": [inner, {"properties": {"b": {}}}]},
        {**inner, "patternProperties": {"^x": {}}},
    ):
        assert closed(open_on_purpose) == open_on_purpose


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, True, None]}, {"string", "number", "boolean", "null"}),
        ({"const": [1]}, {"array"}),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, {"string", "object"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}}, {"boolean"}),
        ({}, {"string", "number", "boolean", "null", "array", "object"}),
    ],
)
def test_types_are_told_by_every_keyword_that_tells(schema, types):
    assert types_of(schema) == types


def test_a_reference_to_itself_ends():
    schema = {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}
    assert types_of(schema) and resolved(schema, schema)
    schema = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    assert "null" in types_of(schema)


def test_what_a_reference_means_takes_nothing_away():
    root = {"$defs": {"x": {"minimum": 3, "title": "T"}}}
    assert resolved({"$ref": "#/$defs/x", "maximum": 5}, root) == {"minimum": 3, "maximum": 5}
    twice = {"$ref": "#/$defs/x", "minimum": 1}
    assert resolved(twice, root) == twice


def test_arguments_come_one_by_one_with_what_they_refer_to():
    definitions = {"x": {"type": "string"}}
    tool = Tool(
        "f",
        parameters={
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "null"}},
            "required": ["b", "c"],
            "$defs": definitions,
        },
    )
    a, b, c = arguments_of(tool, re.compile("[a-z]"), is_lenient=False)
    assert a == ("a", {"type": "string", "$defs": definitions}, False)
    assert (b.name, b.is_required) == ("b", True)
    assert (c.name, c.schema, c.is_required) == ("c", {"$defs": definitions}, True)
