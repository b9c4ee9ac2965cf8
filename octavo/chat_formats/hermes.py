"""Hermes' format, which Qwen 2.5 and 3 write as well: JSON in ``<tool_call>`` tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either, more_calls
from octavo.chat_formats.json_calls import (
    json_call,
    like_a_loose_call,
    loose_json_call,
    read_json_calls,
)
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import MalformedCall, Reading, TextStream
from octavo.chat_formats.tools import Tool

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FENCE = "```"
_BEFORE = rf"({_FENCE}(json|xml|)\n)?"
_DOUBLED = "{{"
_OTHER_NAMESPACE = "]<]minimax[>["  # of MiniMax M3, whose tags have other things in them
_LANGUAGE = re.compile(r"[a-z]+")


class Hermes(ChatFormat):
    """One tag for each call: ``<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>``.

    Small models, and those for code, leave the tags out, or write a fence of Markdown instead. That
    is a call if the answer begins with it, and a tool has the name. Models double the outer braces
    at times, as the template of Qwen2.5-Coder does in its prompt.
    """

    name = "hermes"
    openers = (_BEGIN,)
    closers = (_END,)
    bare_beginnings = "{`"

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_BEGIN) and not template.has(_OTHER_NAMESPACE)

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from _read_calls(stream, message, tools)
        while (yield from stream.skip_space()) == "{":  # another one behind the same tag
            message.end_call()
            yield from _read_calls(stream, message, tools)
        yield from self.read_end(stream, _END)
        message.end_call()

    def read_bare_call(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        in_fence = awaits_call = False
        following = yield from stream.skip_space()
        while following and following in self.bare_beginnings:
            if following == "{":
                yield from _read_calls(stream, message, tools, is_known=True)
                message.end_call()
                awaits_call = False
            else:
                yield from stream.expect(_FENCE)
                in_fence = awaits_call = not in_fence
                if in_fence:
                    yield from stream.while_matching(_LANGUAGE, lambda text: None)
                else:
                    stream.keep()  # what is before is part of a call
            following = yield from stream.skip_space()
        if awaits_call and (following or message.is_empty):
            raise MalformedCall("the fence has something else in it")

    def bare_call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        after = rf"(\n{_FENCE})?"
        plain = loose_json_call(grammar, tools, before=_BEFORE, after=after)
        doubled = loose_json_call(grammar, tools, before=rf"{_BEFORE}\{{", after=rf"\}}{after}")
        call = grammar.rule(either((plain, doubled)))
        return f"{call} {more_calls(call, are_allowed=parallel)}"

    def like_a_bare_call(self, tools: Sequence[Tool]) -> str:
        return like_a_loose_call(tools, rf"{_BEFORE}\{{?")

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        closing = grammar.text("\n" + _END)
        return f"{grammar.text(chr(10))} {json_call(grammar, tools)} {closing}"


def _read_calls(
    stream: TextStream,
    message: MessageWriter,
    tools: Mapping[str, Tool],
    *,
    is_known: bool = False,
) -> Reading[None]:
    """Read a call, or a list of such, as `read_json_calls` does, or a call in doubled braces."""
    is_doubled = yield from stream.starts_with(_DOUBLED)
    if is_doubled:
        stream.back("{")
    yield from read_json_calls(stream, message, tools, is_known=is_known)
    if is_doubled:
        yield from stream.skip_space()
        yield from stream.starts_with("}")  # which may be missing
