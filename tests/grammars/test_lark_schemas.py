"""Schemas within grammars are those of requests: the same keywords, limits and errors."""

from __future__ import annotations

import json

import pytest
from grammar_walks import accepts, mask

from octavo.base.errors import ConstraintError
from octavo.grammars.lark_schemas import with_rewritten_schemas


def grammar(schema, options=None):
    schema = schema if options is None else {**schema, "x-guidance": options}
    return f'start: "<" value ">" // %json {{"not": 1}}\nvalue: %json {json.dumps(schema)}\n'


CONDITION = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
    "if": {"properties": {"a": {"const": "x"}}},
    "then": {"required": ["b"]},
}


def test_keywords_are_those_of_schemas():
    for text, is_valid in (('{"a":"x","b":1}', True), ('{"a":"y"}', True), ('{"a":"x"}', False)):
        assert accepts(mask(grammar=grammar(CONDITION)), f"<{text}>") == is_valid


def test_names_are_not_spelled_in_codes():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(mask(grammar=grammar(schema)), '<{"b":"x"}>')
    assert not accepts(mask(grammar=grammar(schema)), '<{"\\u0061":"x"}>')


def test_what_is_not_supported_is_refused_with_its_place_and_whose_it_is():
    schema = {"items": {"not": {"pattern": "a"}}}
    with pytest.raises(ConstraintError, match="%json: 'not' at #/items is not supported") as error:
        mask(grammar=grammar(schema))
    assert error.value.reason == "unsupported" and error.value.field == "structured_outputs.grammar"
    with pytest.raises(ConstraintError, match="a tool: 'not' at #/items"):
        with_rewritten_schemas(grammar({**schema, "$comment": "a tool"}))


def test_a_lenient_schema_goes_without_what_is_not_supported():
    schema = {"type": "array", "items": {"type": "string", "not": {"pattern": "a"}},
              "uniqueItems": True, "maxItems": 2}  # fmt: skip
    followed = grammar(schema, {"lenient": True})
    assert accepts(mask(grammar=followed), '<["a","a"]>')
    assert not accepts(mask(grammar=followed), '<["a","a","a"]>')


def test_what_only_looks_like_a_schema_stays():
    text = 'start: "%json {" /%json \\{/ // %json {\n'
    assert with_rewritten_schemas(text) == text


@pytest.mark.parametrize(
    ("text", "part"), [("start: %json {", "no JSON"), ("start: %json 3", "must be a JSON schema")]
)
def test_what_is_no_schema_is_refused(text, part):
    with pytest.raises(ConstraintError, match=part):
        mask(grammar=text)
