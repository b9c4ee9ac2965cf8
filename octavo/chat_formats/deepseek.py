"""DeepSeek's formats: a name behind ``<｜tool▁sep｜>`` and a fence of JSON, and later without."""

from __future__ import annotations

import re
from collections.abc import Mapping

from octavo.chat_formats.call_sections import CallSections
from octavo.chat_formats.chat_format import Template
from octavo.chat_formats.grammar import Grammar
from octavo.chat_formats.json_calls import begin_call
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_TYPE, _FENCE = "function", "```json"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


class DeepSeekV31(CallSections):
    """``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``, in a section of calls.

    Both formats are read.
    """

    name = "deepseek-v3.1"
    openers = (_SECTION, _BEGIN)
    closers = (_SECTION_END, _END, _SEPARATOR)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_SECTION)

    def read_one(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        name = yield from stream.matching(_NAME)
        yield from stream.expect(_SEPARATOR)
        if (yield from stream.skip_space()) != "{" and name == _TYPE:
            name = yield from stream.matching(_NAME)
            yield from stream.skip_space()
        begin_call(message, name, tools)
        has_fence = yield from stream.starts_with(_FENCE)
        yield from stream.skip_space()
        yield from stream.json_value(message.arguments)
        if has_fence:
            yield from stream.skip_space()
            yield from stream.expect("```")

    def one(self, grammar: Grammar, tool: Tool) -> str:
        return f"{grammar.text(tool.name + _SEPARATOR)} {grammar.json(tool.parameters)}"


class DeepSeekV3(DeepSeekV31):
    """``function<｜tool▁sep｜>NAME`` and the arguments in a fence of Markdown, of V3 and R1."""

    name = "deepseek-v3"
    separator = "\n"

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_SECTION, _FENCE)

    def one(self, grammar: Grammar, tool: Tool) -> str:
        head = grammar.text(f"{_TYPE}{_SEPARATOR}{tool.name}\n{_FENCE}\n")
        return f"{head} {grammar.json(tool.parameters)} {grammar.text(chr(10) + '```')}"
