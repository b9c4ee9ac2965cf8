from __future__ import annotations

import json
import re

import pytest
from grammar_walks import accepts, mask
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.grammars.json_patterns import without_nul

CLASSES = [r'[^"]', r'[^"\\]', r"[^\\]", r"[^x]", r"[^\]x]", r"[a-z]", r'["x]', r"[\x00-!]",
           r"[^\n]", r"\W", r"[^\x41-\x5d]", r"[\s\S]", r"[^^]", r"[\x00-\x7f]"]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CLASSES), st.sampled_from([*'"\\x]^ay[\n\t\x1fZ', "\\n"]))
def test_a_class_has_no_character_but_its_own(part, text):
    """Against the expressions of Python, which read JSON's text and not its escapes."""
    schema = {"type": "string", "pattern": f"^{part}$"}
    if accepts(mask(json=schema), json.dumps(text)):
        assert re.fullmatch(part, text)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ('^[^"]+$', r'^[^\x00"]+$'),
        (r"a[^]b]c", r"a[^\x00\]b]c"),
        (r"\[^a]", r"\[^a]"),
        ("[a-z]", "[a-z]"),
        (r"[\x00-!]a", r"[[\x00-!]--\x00]a"),
    ],
)
def test_nul_is_taken_out_of_classes(pattern, expected):
    assert without_nul(pattern) == expected


def test_the_same_holds_for_names():
    schema = {"type": "object", "patternProperties": {'^[^"]$': {}}, "additionalProperties": False}
    assert accepts(mask(json=schema), '{"a":1}')
    assert not accepts(mask(json=schema), '{"\\"":1}')
