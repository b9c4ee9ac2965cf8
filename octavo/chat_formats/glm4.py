"""GLM 4.5's format: a name, and pairs of tags for the keys and values of its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either
from octavo.chat_formats.json_calls import begin_call
from octavo.chat_formats.json_schemas import Argument
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.tagged_arguments import TaggedArguments, read_name, tagged_arguments
from octavo.chat_formats.tagged_values import tagged_value
from octavo.chat_formats.text_stream import Reading, Tags, TextStream
from octavo.chat_formats.tools import Tool

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_VALUE_ENDS = Tags((_VALUE_END,))
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_NAMES = re.compile(r"[^<>\n]+")


class GLM4(ChatFormat):
    """``<tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>``.

    A value is all that is between its tags.
    """

    name = "glm-4.5"
    openers = (_BEGIN,)
    closers = (_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    gap: ClassVar[str] = "\n"  # between tags

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_BEGIN, _KEY, _VALUE)

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        name = yield from stream.matching(_NAME)
        begin_call(message, name, tools)
        arguments = TaggedArguments(message, tools.get(name))
        yield from stream.skip_space()
        while (yield from stream.starts_with(_KEY)):
            key = yield from read_name(stream, _KEY_END)
            yield from stream.skip_space()
            yield from stream.expect(_VALUE)
            yield from arguments.read(stream, key.strip(), _VALUE_ENDS)
            yield from stream.skip_space()
        arguments.end()
        yield from self.read_end(stream, _END)
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        def written(argument: Argument, where: str) -> str:
            begin = grammar.text(f"{_KEY}{argument.name}{_KEY_END}{self.gap}{_VALUE}")
            return f"{begin} {tagged_value(grammar, argument.schema, _VALUE_END + self.gap, where)}"

        def call(tool: Tool) -> str:
            arguments = tagged_arguments(grammar, tool, _NAMES, written)
            return f"{grammar.text(tool.name + self.gap)} {arguments} {grammar.text(_END)}"

        return grammar.rule(either(map(call, tools)))


class GLM47(GLM4):
    """The same without newlines."""

    name = "glm-4.7"
    gap = ""

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_BEGIN, f"{_KEY_END}{_VALUE}")
