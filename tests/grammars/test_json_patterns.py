from __future__ import annotations

import json
import re

import pytest
from grammar_walks import accepts, mask
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.grammars.json_patterns import pattern_of_others, writable

CLASSES = [r'[^"]', r'[^"\\]', r"[^\\]", r"[^x]", r"[^\]x]", r"[a-z]", r'["x]', r"[\x00-!]",
           r"[^\n]", r"\W", r"[^\x41-\x5d]", r"[\s\S]", r"[^^]", r"[\x00-\x7f]"]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CLASSES), st.sampled_from([*'"\\x]^ay[\n\t\x1fZ', "\\n"]))
def test_a_class_has_no_character_but_its_own(part, text):
    """Against the expressions of Python, which read JSON's text and not its escapes."""
    schema = {"type": "string", "pattern": f"^{part}$"}
    if accepts(mask(json=schema), json.dumps(text)):
        assert re.fullmatch(part, text)


CODES = r"\x00-\x07\x0b\x0e-\x1f\x7f"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ('^[^"]+$', rf'^[^{CODES}"]+$'),
        (r"a[^]b]c", rf"a[^{CODES}\]b]c"),
        (r"\[^a]", r"\[^a]"),
        ("[a-z]", "[a-z]"),
        (r"[\x00-!]a", rf"[[\x00-!]--[{CODES}]]a"),
        (r"a\x01\u0002\x{3}b\x41", "a" + 3 * "[a&&b]" + r"b\x41"),
        ("\x7f", "[a&&b]"),
    ],
)
def test_characters_that_have_codes_alone_are_taken_out(pattern, expected):
    assert writable(pattern) == expected


@pytest.mark.parametrize("text", ["1", "-1.5", ".5", "+2.", "", ".", "-", "+.", "1.2.3", "a"])
def test_the_expression_of_decimals_of_pydantic_is_followed(text):
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    schema = {"type": "string", "pattern": pattern}
    assert accepts(mask(json=schema), json.dumps(text)) == bool(re.search(pattern, text))


def test_a_text_with_such_a_character_is_not_written_without_it():
    for schema in ({"const": "a\u0001b"}, {"enum": ["a\u0001b"]}, {"pattern": "^a\u0001b$"}):
        schema = {"anyOf": [{"type": "string", **schema}, {"type": "null"}]}
        assert accepts(mask(json=schema), "null") and not accepts(mask(json=schema), '"ab"')


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text('ab"\\é😀', max_size=4), max_size=6), st.text('ab"\\é😀', max_size=4))
def test_all_texts_but_some(texts, text):
    schema = {"type": "string", "pattern": pattern_of_others(texts)}
    written = json.dumps(text, ensure_ascii=False)
    assert accepts(mask(json=schema), written) == (text not in texts)


def test_the_same_holds_for_names():
    schema = {"type": "object", "patternProperties": {'^[^"]$': {}}, "additionalProperties": False}
    assert accepts(mask(json=schema), '{"a":1}')
    assert not accepts(mask(json=schema), '{"\\"":1}')
