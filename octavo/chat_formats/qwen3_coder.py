"""Qwen3-Coder's format: a tag for each function, and one for each of its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# The newlines around a value are not part of it.
_VALUE_ENDS = Tags(("\n" + _PARAMETER_END, _PARAMETER_END))
_NAMES = re.compile(r"[^<>\n]+")


class Qwen3Coder(ChatFormat):
    """``<tool_call>\\n<function=NAME>\\n<parameter=NAME>\\nVALUE\\n</parameter>…</tool_call>``.

    Models leave out the outer tag at times.
    """

    name = "qwen3-coder"
    openers = (_BEGIN, _FUNCTION)
    closers = (_END, _FUNCTION_END, _PARAMETER, _PARAMETER_END)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_FUNCTION, _PARAMETER)

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        if opener == _FUNCTION:
            yield from self._read_function(stream, message, tools)
            message.end_call()
            return
        yield from stream.skip_space()
        yield from stream.expect(_FUNCTION)
        while True:
            yield from self._read_function(stream, message, tools)
            yield from stream.skip_space()
            if not (yield from stream.starts_with(_FUNCTION)):
                break
            message.end_call()
        yield from self.read_end(stream, self.closers[0])
        message.end_call()

    def _read_function(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        name = yield from read_name(stream, ">")
        begin_call(message, name, tools)
        arguments = TaggedArguments(message, tools.get(name))
        while True:
            yield from stream.skip_space()
            if (yield from stream.starts_with(_FUNCTION_END)):
                break
            yield from stream.expect(_PARAMETER)
            key = yield from read_name(stream, ">")
            yield from stream.starts_with("\n")
            yield from arguments.read(stream, key, _VALUE_ENDS)
        arguments.end()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return grammar.rule(either(self._function(grammar, tool) for tool in tools))

    def _function(self, grammar: Grammar, tool: Tool) -> str:
        def written(argument: Argument, where: str) -> str:
            value = tagged_value(grammar, argument.schema, f"\n{_PARAMETER_END}\n", where)
            return f"{grammar.text(f'{_PARAMETER}{argument.name}>' + chr(10))} {value}"

        begin = grammar.text(f"\n{_FUNCTION}{tool.name}>\n")
        arguments = tagged_arguments(grammar, tool, _NAMES, written)
        return f"{begin} {arguments} {grammar.text(_FUNCTION_END + chr(10) + self.closers[0])}"


class SeedOSS(Qwen3Coder):
    """The same in ``<seed:tool_call>``."""

    name = "seed-oss"
    openers = ("<seed:tool_call>", _FUNCTION)
    closers = ("</seed:tool_call>", *Qwen3Coder.closers[1:])

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has("<seed:tool_call>", _FUNCTION)
