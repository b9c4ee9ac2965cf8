from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest
from format_cases import CASES, TOOLS, parsed
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.chat_formats.chat_format import ChatFormat, parse
from octavo.chat_formats.messages import ParsedMessage
from octavo.chat_formats.text_stream import Tags

KINDS = st.sampled_from(sorted(CASES))


def fragments(name: str) -> st.SearchStrategy[str]:
    """Tags and texts of a format, whole and cut, and what may be wrong in them."""
    format = CASES[name].format()
    tags = [*format.openers, *format.closers, *format.marks, *(format.thoughts or ()), "<eos>"]
    texts = [*tags, *CASES[name].texts]
    cut = st.sampled_from(texts).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    odd = st.sampled_from(
        [*"{}[]()\"\\<>=:,; \n", "'", '\\"', "\\u00", "\\u00e9", '{"name"', '{"tool_calls": [',
         "[clock(", "'", "True", '{"a": {"b": [1, {"c": "}"}]}}', "é", "𝒳", "\r\n", "</",
         "clock", "get_weather"]
    )  # fmt: skip
    return st.one_of(st.sampled_from(texts), cut, odd, st.text(max_size=4))


@st.composite
def cut_texts(draw) -> tuple[str, str, list[str], dict[str, bool]]:
    """A format's name, a text, the text in pieces, and the options of a parser."""
    name = draw(KINDS)
    text = "".join(draw(st.lists(fragments(name), max_size=8)))
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    if draw(st.booleans()):
        places = list(range(len(text)))
    pieces = [text[i:j] for i, j in pairwise([0, *places, len(text)])]
    has_thoughts = CASES[name].format().thoughts is not None
    options = {
        "begins_in_thought": draw(st.booleans()) and has_thoughts,
        "is_constrained": draw(st.booleans()),
        "content_is_json": draw(st.booleans()),
    }
    return name, text, pieces, options


@settings(max_examples=300, deadline=None)
@given(cut_texts())
def test_however_a_text_is_cut_the_deltas_joined_are_the_message(case):
    name, text, pieces, options = case
    format = CASES[name].format()
    whole = parsed(format.parser(TOOLS, **options), [text])
    assert parsed(format.parser(TOOLS, **options), pieces) == whole


@settings(max_examples=300, deadline=None)
@given(cut_texts())
def test_no_tag_reaches_the_content_and_no_call_is_broken(case):
    name, text, pieces, options = case
    format = CASES[name].format()
    begins = options["begins_in_thought"]
    message = parsed(format.parser(TOOLS, begins_in_thought=begins), pieces)
    for call in message.tool_calls:
        assert call.name and isinstance(json.loads(call.arguments), dict)
    tags = (
        *format.openers,
        *format.closers,
        *format.marks,
        *(format.thoughts or ()),
        "<eos>",
        "<stop>",
    )
    # What is left of a text without its tags can happen to be one.
    rest = text
    for tag in tags:
        rest = rest.replace(tag, "\0")
    if not any(tag in rest.replace("\0", "") for tag in tags):
        assert not any(tag in (message.content or "") for tag in tags)


@given(st.text(), KINDS)
def test_text_without_tags_is_content_as_it_is(text, name):
    if any(character in text for character in "<[{"):
        return
    assert parse(CASES[name].format(), text, TOOLS) == ParsedMessage(content=text or None)


def work(format: ChatFormat, text: str, size: int, **options) -> int:
    """The number of lines of Python that parsing takes, and of characters that it copies."""
    lines = 0

    def count(frame, event, arg):
        nonlocal lines
        lines += 1
        return count

    parser = format.parser(TOOLS, **options)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    sys.settrace(count)
    try:
        parsed(parser, pieces)
    finally:
        sys.settrace(None)
    return lines


HOSTILE = {
    "openers": ("hermes", "<tool_call>"),
    "openers with beginnings": ("hermes", '<tool_call>{"a":"'),
    "thoughts": ("hermes", "<think>"),
    "beginnings of tags": ("hermes", "<tool_cal"),
    "white space": ("hermes", " \n"),
    "one long call": ("hermes", "\\\\"),
    "parameters": ("qwen3-coder", "<function=clock><parameter=a>"),
    "lists": ("pythonic", "[clock(a=["),
    "headers": ("harmony", "<|start|>assistant to=x"),
    "messages": ("harmony", "<|channel|>analysis<|message|>a<|end|>"),
    "calls of harmony": ("harmony", "<|channel|>commentary to=clock<|message|>{"),
    "sections": ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>clock"),
    "objects": ("gemma-4", "<|tool_call>call:clock{a:[{"),
    "keys": ("glm-4.5", "<tool_call>clock<arg_key>a</arg_key>"),
    "invokes": ("minimax-m2", '<minimax:tool_call><invoke name="clock">'),
    "names": ("mistral-args", "[TOOL_CALLS]clock[ARGS]{"),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("is_constrained", [False, True])
def test_work_grows_with_the_text_and_no_faster(kind, size, is_constrained):
    name, part = HOSTILE[kind]
    begin = '<tool_call>{"name": "clock", "arguments": {"a": "' if kind == "one long call" else ""
    format = CASES[name].format()
    some, more = (
        work(format, begin + part * count, size, is_constrained=is_constrained)
        for count in (50, 400)
    )
    assert more < 10 * some + 500


def call_of_clock(name: str) -> str:
    """A call that a model would write, and what may come before the next one."""
    case = CASES[name]
    return next(text for text, parts in case.texts.items() if parts[2])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_constrained", [False, True])
def test_work_of_every_format_grows_with_hostile_text_and_no_faster(name, is_constrained):
    format = CASES[name].format()
    call = call_of_clock(name)
    begin = call[: len(call) // 2]
    tags = "".join((*format.openers, *format.closers, *format.marks, *(format.thoughts or ())))
    for part in (call, tags, begin + "[" * 40 + '{"\\ud800":"'):
        some, more = (
            work(format, part * count, 7, is_constrained=is_constrained) for count in (5, 40)
        )
        assert more < 10 * some + 2000, part


@pytest.mark.parametrize("name", CASES)
def test_much_is_parsed_and_nothing_of_it_is_kept(name):
    """A parser holds a bounded number of characters, however many have gone through it."""
    format = CASES[name].format()
    parser = format.parser(TOOLS, is_constrained=True)
    piece = (format.openers or ("{",))[0] * 64
    for _ in range((1 << 17) // len(piece)):
        parser.push(piece)
    stream = parser._stream
    assert len(stream._text) - stream._at + sum(map(len, stream._kept or ())) < 1 << 13
    parser.finish()


def test_of_many_malformed_calls_the_first_are_warned_of_and_all_are_counted():
    parser = CASES["hermes"].format().parser(TOOLS)
    parsed(parser, ["<tool_call>x</tool_call>" * 100])
    assert len(parser.warnings) == 16 and len(parser.malformed) == 100


def test_lone_surrogates_of_escapes_leave_nothing_that_cannot_be_written():
    texts = {
        "hermes": [
            '<tool_call>{"name": "\\ud800", "arguments": {"a": "\\udfff"}}</tool_call>',
            '<tool_call>{"name": "clock", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
        ],
        "tagged-pythonic": [
            f"<|tool_call_start|>[clock(a='{escape}')]<|tool_call_end|>"
            for escape in ("\\ud800", "\\U0000dfff", "\\U0001f600")
        ],
        "gemma-4": ['<|tool_call>call:clock{a:"\\ud800"}<tool_call|>'],
    }
    for name, written in texts.items():
        for text in written:
            (call,) = parse(CASES[name].format(), text, TOOLS).tool_calls
            call.name.encode(), call.arguments.encode()
            json.loads(call.arguments)


def test_a_text_that_looks_like_a_tag_is_held_back_until_it_is_none():
    parser = CASES["hermes"].format().parser(TOOLS)
    assert parser.push("a <tool_").content == "a"
    assert parser.push("box").content == " <tool_box"
    assert parser.push("<think").content == ""
    assert parser.finish().content == "<think"


def test_content_is_not_held_back_at_all():
    for case in CASES.values():
        parser = case.format().parser(TOOLS)
        assert [parser.push(part).content for part in ("One", ", two", ".")] == [
            "One",
            ", two",
            ".",
        ]


def test_a_call_without_end_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr("octavo.chat_formats.message_writer.MAX_HELD", 1000)
    parser = CASES["hermes"].format().parser(TOOLS)
    parser.push('<tool_call>{"name": "clock", "arguments": {"a": "')
    contents = [parser.push("x" * 100).content for _ in range(12)]
    assert any(contents) and contents[-1]
    assert "more than 1000 characters" in parser.warnings[0]


@given(
    st.lists(st.text("<a/>", min_size=1, max_size=4), max_size=4),
    st.text("<a/>x", max_size=20),
    st.integers(0, 5),
)
def test_tags_are_found_leftmost_and_longest_first(tags, text, start):
    found = [
        (at, -len(tag))
        for tag in tags
        for at in range(start, len(text))
        if text.startswith(tag, at)
    ]
    begin, length = min(found, default=(len(text), 0))
    if start <= len(text):
        assert Tags(tags).find(text, start, is_whole=True) == (begin, begin - length)
