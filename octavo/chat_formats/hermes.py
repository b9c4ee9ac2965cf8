"""Hermes' format, which Qwen 2.5 and 3 write as well: JSON in ``<tool_call>`` tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar
from octavo.chat_formats.json_calls import json_call, read_json_calls
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(ChatFormat):
    """One tag for each call: ``<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>``."""

    name = "hermes"
    openers = (_BEGIN,)
    closers = (_END,)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_BEGIN)

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from read_json_calls(stream, message, tools)
        while (yield from stream.skip_space()) == "{":  # another one behind the same tag
            message.end_call()
            yield from read_json_calls(stream, message, tools)
        yield from self.read_end(stream, _END)
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        closing = grammar.text("\n" + _END)
        return f"{grammar.text(chr(10))} {json_call(grammar, tools)} {closing}"
