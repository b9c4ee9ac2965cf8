from __future__ import annotations

import pytest
from byte_tokens import STOP
from grammar_walks import accepts, mask

from octavo.base.errors import ConstraintError

INTEGER = {"type": "integer"}
OLDER = {
    "structures": [
        {"begin": "<f=x>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def newer(format):
    return {"type": "structural_tag", "format": format}


def tag(begin, end, content):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


NUMBER = {"type": "json_schema", "json_schema": INTEGER}
TAGS = [tag("<f=x>", "</f>", NUMBER), tag("<f=y>", "</f>", {"type": "regex", "pattern": "a+"})]


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("", True),
        ("free text < and so on", True),
        ("<f=", False),
        ("<f=x>12</f>", True),
        ("a <f=x>12</f> b <f=y>true</f> c", True),
        ("<f=x>true</f>", False),
        ("<f=z>12</f>", False),
        ("<f=x>12", False),
    ],
)
def test_tags_begin_at_triggers_in_free_text(text, is_whole):
    assert accepts(mask(structural_tag=OLDER), text) == is_whole
    content = [
        {"type": "tag", "begin": each["begin"], "end": each["end"],
         "content": {"type": "json_schema", "json_schema": each["schema"]}}
        for each in OLDER["structures"]
    ]  # fmt: skip
    same = {"type": "triggered_tags", "triggers": OLDER["triggers"], "tags": content}
    assert accepts(mask(structural_tag=newer(same)), text) == is_whole


@pytest.mark.parametrize(
    ("format", "whole", "other"),
    [
        ({"type": "const_string", "value": "abc"}, ["abc"], ["", "ab"]),
        (NUMBER, ["1", "-20"], ["a", ""]),
        ({"type": "regex", "pattern": "a|b"}, ["a", "b"], ["c"]),
        ({"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, ["y", "xxy"], ["x"]),
        ({"type": "any_text"}, ["", "anything\n"], []),
        ({"type": "any_text", "excludes": ["no"]}, ["", "n o"], ["no", "a no b"]),
        ({"type": "sequence", "elements": [NUMBER, {"type": "const_string", "value": ";"}]},
         ["1;"], ["1", ";"]),
        ({"type": "or", "elements": [NUMBER, {"type": "const_string", "value": ";"}]},
         ["1", ";"], ["1;"]),
        ({"type": "optional", "content": NUMBER}, ["", "1"], ["a"]),
        ({"type": "star", "content": {"type": "const_string", "value": "ab"}},
         ["", "abab"], ["aba"]),
        ({"type": "plus", "content": {"type": "const_string", "value": "ab"}},
         ["ab", "abab"], [""]),
        (TAGS[0], ["<f=x>1</f>"], ["1", "<f=x>a</f>"]),
        (tag("<t>", "</t>", {"type": "any_text"}), ["<t></t>", "<t>ab</t>"], ["<t>a</t>b"]),
        (tag("<t>", ["!", "?"], {"type": "any_text"}), ["<t>a!", "<t>b?"], ["<t>a!b?"]),
        (tag("<t>", ["!", "?"], NUMBER), ["<t>1!", "<t>2?"], ["<t>1"]),
        ({"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "at_least_one": True},
         ["<f=x>1</f>", "<f=y>a</f> and <f=x>1</f>."], ["", "a", "a<f=x>1</f>"]),
        ({"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "stop_after_first": True},
         ["", "text", "text<f=x>1</f>"], ["<f=x>1</f>."]),
        ({"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "stop_after_first": True,
          "at_least_one": True}, ["<f=x>1</f>"], ["", "<f=x>1</f>."]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": ","},
         ["", "<f=x>1</f>", "<f=x>1</f>,<f=y>aa</f>"], ["<f=x>1</f><f=y>a</f>", "<f=x>1</f>,"]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": ",", "at_least_one": True},
         ["<f=x>1</f>"], [""]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": ",", "stop_after_first": True},
         ["", "<f=x>1</f>"], ["<f=x>1</f>,<f=y>a</f>"]),
    ],
)  # fmt: skip
def test_a_format_has_its_texts_and_no_others(format, whole, other):
    for text in whole:
        assert accepts(mask(structural_tag=newer(format)), text), text
    for text in other:
        assert not accepts(mask(structural_tag=newer(format)), text), text


def test_special_tokens_of_tags_are_tokens():
    format = {"type": "triggered_tags", "triggers": ["<stop>"],
              "tags": [tag("<stop>x", "<stop>", NUMBER)]}  # fmt: skip
    assert accepts(mask(structural_tag=newer(format)), [*b"a", STOP, *b"x12", STOP, *b"b"])
    assert not accepts(mask(structural_tag=newer(format)), [*b"a", STOP, *b"y"])
    any_text = tag("x", "<stop>", {"type": "any_text"})
    assert accepts(mask(structural_tag=newer(any_text)), [*b"xabc", STOP])


NOT_A = {"not": {"pattern": "a"}}


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ({}, "#/type"),
        ("[]", "not an object"),
        ("{", "no JSON"),
        ({**OLDER, "triggers": ["<g"]}, "#/structures/0/begin"),
        ({**OLDER, "triggers": []}, "#/triggers"),
        ({**OLDER, "trigger": ["<f"]}, "'trigger'"),
        (newer({"type": "qwen_xml_parameter"}), "'qwen_xml_parameter' at #/format"),
        (newer({"type": "sequence", "elements": [{"type": "foo"}]}), "#/format/elements/0"),
        (newer({**NUMBER, "style": "xml"}), "'style'"),
        (newer(tag("<t>", "</t>", {"type": "regex", "pattern": "("})), "unclosed group"),
        (newer(tag("<t>", "</t>", {"type": "json_schema", "json_schema": NOT_A})),
         "#/format/content/json_schema: 'not' at #"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(value, part):
    with pytest.raises(ConstraintError, match="structural_tag") as error:
        mask(structural_tag=value)
    assert part in str(error.value)
