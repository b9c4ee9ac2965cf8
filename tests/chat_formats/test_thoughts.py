from __future__ import annotations

import pytest

from octavo.chat_formats.chat_format import ChatFormat, parse
from octavo.chat_formats.registry import format_of
from octavo.chat_formats.thoughts import ThoughtTags

SPECIALS = {"<|im_start|>": 1, "<|im_end|>": 2}


def thinking(source: str = "<think></think>", **specials: int) -> ChatFormat:
    return format_of(source, {**SPECIALS, **specials})


@pytest.mark.parametrize(
    ("source", "specials", "tags"),
    [
        ("{% set content = content.split('</think>')[-1] %}", {}, ("<think>", "</think>")),
        ("[THINK]", {}, ("[THINK]", "[/THINK]")),
        ("", {"<think>": 7, "</think>": 8}, ("<think>", "</think>")),
        ("", {"<think>": 7}, None),
        ("{{ messages }}", {}, None),
    ],
)
def test_template_or_vocabulary_tell_the_tags(source, specials, tags):
    found = thinking(source, **specials).thoughts
    assert found == (tags and ThoughtTags(*tags))


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),  # not wanted
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\nLet me see: ", True),  # to be continued
    ],
)
def test_the_end_of_the_prompt_tells_whether_the_answer_begins_in_a_thought(prompt, begins):
    assert thinking().begins_in_thought(prompt) == begins


def test_without_thoughts_no_answer_begins_in_one():
    assert not format_of("", SPECIALS).begins_in_thought("<think>")


@pytest.mark.parametrize(
    ("text", "begins", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", False, "Hm.", "Yes.\n"),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>\nHm.\n</think>\n\nYes.", True, "Hm.", "Yes."),  # begun twice
        ("<think>\n\n</think>\n\nYes.", False, None, "Yes."),
        ("Never ending", True, "Never ending", None),
        ("<think>Never ending\n", False, "Never ending", None),
        ("Hm.\n</think>\n\nYes.", False, None, "Hm.\n\n\nYes."),  # without a beginning
        ("<think>a</think>b<think>c</think>d", False, "a\n\nc", "bd"),
        ("<think>a</think>\n\n<|im_end|>", False, "a", None),
        (" \n", False, None, " \n"),
        ("", True, None, None),
    ],
)
def test_thoughts_are_apart_from_the_content(text, begins, reasoning, content):
    message = parse(thinking(), text, begins_in_thought=begins)
    assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize("tag", ["response", "answer"])
def test_tags_of_answers_that_a_template_knows_are_no_content(tag):
    text = f"Hm.\n</think>\n\n\n<{tag}>\nYes.\n</{tag}>\n"
    format = thinking(f"<think></think><tool_call><{tag}></{tag}>")
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for tools in ([], [{"name": "f"}]):
        message = parse(format, text, tools, begins_in_thought=True)
        assert (message.reasoning, (message.content or "").strip()) == ("Hm.", "Yes.")
    message = parse(format, text + call, tools, begins_in_thought=True)
    assert (message.content, [each.name for each in message.tool_calls]) == ("Yes.", ["f"])
    assert parse(format, f"A <{tag}>.").content == f"A <{tag}>."


def test_a_parser_knows_whether_it_is_in_a_thought():
    parser = thinking().parser(begins_in_thought=True)
    states = []
    for piece in ("Hm", ".</thi", "nk>", "Yes <think>", "more"):
        parser.push(piece)
        states.append(parser.is_reasoning)
    assert states == [True, True, False, True, True]
    parser.finish()
    assert not parser.is_reasoning


def test_a_thought_may_speak_of_tags_but_not_of_control_tokens():
    tool = {"name": "f"}
    text = 'I may <tool_call>.</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    format = format_of("tools <tool_call> <think>", SPECIALS)
    message = parse(format, text, [tool], begins_in_thought=True)
    assert message.reasoning == "I may <tool_call>."
    assert [call.name for call in message.tool_calls] == ["f"]

    format = format_of("tools [TOOL_CALLS] [ARGS] [THINK]", {"[TOOL_CALLS]": 3, "[ARGS]": 4})
    message = parse(format, "Hm. [TOOL_CALLS]f[ARGS]{}", [tool], begins_in_thought=True)
    assert message.reasoning == "Hm."
    assert [call.name for call in message.tool_calls] == ["f"]


def test_texts_that_end_a_thought_are_known():
    assert format_of("", SPECIALS).ends_of_thought == ()
    assert thinking().ends_of_thought == ("</think>",)
    format = format_of("tools [TOOL_CALLS] [THINK]", {"[TOOL_CALLS]": 3})
    assert format.ends_of_thought == ("[/THINK]", "[TOOL_CALLS]")
