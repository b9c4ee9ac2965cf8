"""Kimi K2's format: a section of calls, each with an id that has the name in it."""

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

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEAD = re.compile(r"[A-Za-z0-9_.:/-]+")
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?P<index>:[0-9]+)?")


class KimiK2(CallSections):
    """``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{…}<|tool_call_end|>``,
    in a section of calls. What is before the arguments is the call's id, which the template wants
    back with the result.
    """

    name = "kimi-k2"
    openers = (_SECTION, _BEGIN)
    closers = (_SECTION_END, _END, _ARGUMENTS)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_SECTION)

    def read_one(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        call_id = yield from stream.matching(_HEAD)
        yield from stream.skip_space()
        yield from stream.expect(_ARGUMENTS)
        found = _ID.fullmatch(call_id)
        name = found["name"] if found is not None else ""
        begin_call(message, name, tools, call_id if found is not None and found["index"] else "")
        yield from stream.skip_space()
        yield from stream.json_value(message.arguments)

    def one(self, grammar: Grammar, tool: Tool) -> str:
        index = grammar.pattern("[0-9]{1,3}")
        head = f"{grammar.text(f'functions.{tool.name}:')} {index} {grammar.text(_ARGUMENTS)}"
        return f"{head} {grammar.json(tool.parameters)}"
