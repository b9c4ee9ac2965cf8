from __future__ import annotations

import re

import pytest
from format_cases import CASES, TOOLS, parsed

from octavo.chat_formats.chat_format import parse

ANSWERS = [(name, text) for name, case in CASES.items() for text in case.texts]


@pytest.mark.parametrize("is_constrained", [False, True])
@pytest.mark.parametrize(("name", "text"), ANSWERS)
def test_answers_of_each_family_are_understood(name, text, is_constrained):
    reasoning, content, calls = CASES[name].texts[text]
    message = parse(CASES[name].format(), text, TOOLS, is_constrained=is_constrained)
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    assert (message.reasoning, message.content) == (reasoning, content)
    assert message.warnings == []


@pytest.mark.parametrize(("name", "text"), ANSWERS)
def test_character_by_character_they_are_the_same(name, text):
    format = CASES[name].format()
    for is_constrained in (False, True):
        pieces = parsed(format.parser(TOOLS, is_constrained=is_constrained), list(text))
        assert pieces == parsed(format.parser(TOOLS, is_constrained=is_constrained), [text])


@pytest.mark.parametrize(("name", "text"), ANSWERS)
def test_without_tools_thoughts_and_content_are_the_same(name, text):
    reasoning, content, calls = CASES[name].texts[text]
    if not calls:
        message = parse(CASES[name].format(), text)
        assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize(("name", "text"), ANSWERS)
def test_arguments_under_a_grammar_leave_as_they_come(name, text):
    calls = CASES[name].texts[text][2]
    if all(arguments == "{}" for _, arguments in calls) or '{"arguments"' in text:
        return  # there are none, or they are kept until the name has come
    parser = CASES[name].format().parser(TOOLS, is_constrained=True)
    pieces = [
        piece for character in text for piece in parser.push(character).tool_calls if not piece.name
    ]
    assert len(pieces) > 3


def test_ids_are_made_and_differ():
    for case in CASES.values():
        ids = [
            call.id for text in case.texts for call in parse(case.format(), text, TOOLS).tool_calls
        ]
        pattern = r"[A-Za-z0-9]{9}" if "TOOL_CALLS" in case.source else r"call_[0-9a-f]{24}"
        if "tool_calls_section" in case.source:  # ids are in the text
            pattern += r"|functions\..+:[0-9]"
        assert ids and all(re.fullmatch(pattern, each) for each in ids)
        assert len(set(ids)) == len(ids)


def test_ids_in_the_text_are_those_of_the_calls_unless_one_is_there_twice():
    call = "<|tool_call_begin|>functions.clock:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = "<|tool_calls_section_begin|>" + 2 * call + "<|tool_calls_section_end|>"
    first, second = parse(CASES["kimi-k2"].format(), text, TOOLS).tool_calls
    assert first.id == "functions.clock:7" and second.id.startswith("call_")


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", 'a <tool_call>\n{"name": "clock", "argum', 'a \n{"name": "clock", "argum'),
        ("hermes", "<tool_call>clock()</tool_call>", "clock()"),
        ("hermes", '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": 1,}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {}}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": "\n"}}</tool_call>', None),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None),
        ("qwen3-coder", "<tool_call><function=clock></tool_call>", "clock>"),
        ("qwen3-coder", "<function=edit><parameter=lines>[1</parameter></function>", None),
        ("mistral", '[TOOL_CALLS][{"name": "clock"', '[{"name": "clock"'),
        ("mistral-args", '[TOOL_CALLS]clock[ARGS]{"a"', 'clock{"a"'),
        ("tagged-pythonic", "<|tool_call_start|>[clock(1)]<|tool_call_end|>", "[clock(1)]"),
        ("pythonic", "[clock(a=b)]", "[clock(a=b)]"),
        ("llama-json", '{"name": "clock", "parameters": {"a": nope}}', None),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>1<｜tool▁call▁end｜>", "clock1"),
        ("kimi-k2", "<|tool_calls_section_begin|>clock<|tool_calls_section_end|>", "clock"),
        (
            "functiongemma",
            "<start_function_call>call:clock{a:b}<end_function_call>",
            "call:clock{a:b}",
        ),
        ("gemma-4", '<|tool_call>call:clock{a:<|"|>b}', "call:clock{a:b}"),
        ("glm-4.5", "<tool_call>clock<arg_key>a</arg_key></tool_call>", "clocka"),
        ("minimax-m2", '<minimax:tool_call><invoke name="clock">x', '<invoke name="clock">x'),
        ("granite-3", "<|tool_call|>clock()", "clock()"),
        ("phi-4-mini", 'functools[{"name": "clock", "arguments": [}]', None),
        (
            "harmony",
            "<|channel|>commentary to=functions.clock<|message|>Now<|call|>",
            "Now",
        ),
    ],
)
def test_a_malformed_call_is_content_and_a_warning(name, text, content):
    message = parse(CASES[name].format(), text, TOOLS)
    if content is None:  # all but the tags
        content = re.sub(r"</?(tool_call|function|parameter)>|<(function|parameter)=", "", text)
    assert message.content == content and message.tool_calls == []
    (warning,) = message.warnings
    assert warning.startswith("a tool call is malformed: ")


def test_what_looks_like_a_call_without_a_tag_is_content_without_a_warning():
    for name, text in (
        ("llama-json", '{"a": 1}'),
        ("hermes", '{"answer": 4, "name": "x"}'),
        ("pythonic", "[x(1)]"),
        ("generic-json", "{}"),
    ):
        message = parse(CASES[name].format(), text, TOOLS)
        assert (message.content, message.warnings) == (text, [])


def test_a_good_call_after_a_malformed_one_is_a_call():
    good = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    message = parse(CASES["hermes"].format(), "<tool_call>x</tool_call>" + good, TOOLS)
    assert message.content == "x"
    assert [call.name for call in message.tool_calls] == ["clock"]


def test_a_call_of_an_unknown_tool_behind_a_tag_is_a_call_with_a_warning():
    text = '<tool_call>{"name": "dial", "arguments": {}}</tool_call>'
    message = parse(CASES["hermes"].format(), text, TOOLS)
    assert [call.name for call in message.tool_calls] == ["dial"]
    assert message.warnings == ["no tool has the name 'dial'"]


def test_without_tools_nothing_is_a_call():
    text = 'Write <tool_call>{"name": "clock", "arguments": {}}</tool_call> to call.'
    message = parse(CASES["hermes"].format(), text)
    assert (message.content, message.tool_calls) == (text, [])


def test_arguments_as_text_and_none_at_all_are_objects():
    for given, arguments in (('"{\\"a\\": 1}"', '{"a": 1}'), ("null", "{}")):
        text = f'<tool_call>{{"name": "clock", "arguments": {given}}}</tool_call>'
        (call,) = parse(CASES["hermes"].format(), text, TOOLS).tool_calls
        assert call.arguments == arguments
    text = '<tool_call>{"name": "clock"}</tool_call>'
    assert parse(CASES["hermes"].format(), text, TOOLS).tool_calls[0].arguments == "{}"


def test_a_call_that_a_grammar_kept_valid_and_the_length_cut_off_stays_a_prefix():
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa'
    message = parse(CASES["hermes"].format(), text, TOOLS, is_constrained=True)
    assert [call.arguments for call in message.tool_calls] == ['{"city": "Pa']
    assert message.content is None and message.warnings


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "clock"', "cut_off"),
        ("hermes", "<tool_call>clock", "syntax"),
        ("hermes", '<tool_call>{"name": "clock", "arguments": "[]"}</tool_call>', "arguments"),
        ("hermes", '<tool_call>{"name": ""}', "unknown_tool"),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": ' + 300 * "[", "too_large"),
        ("qwen3-coder", "<function=clock", "cut_off"),
    ],
)
def test_malformed_calls_are_counted_by_reason(name, text, reason):
    parser = CASES[name].format().parser(TOOLS)
    parsed(parser, [text])
    assert parser.malformed == [reason]
