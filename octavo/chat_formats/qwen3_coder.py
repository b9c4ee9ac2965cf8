"""Qwen3-Coder's format: a tag for each function, and one for each of its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either
from octavo.chat_formats.json_calls import begin_call
from octavo.chat_formats.json_schemas import DEFINITIONS, arguments_of
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.tagged_values import json_inside, read_tagged_value, tagged_value
from octavo.chat_formats.text_stream import MalformedCall, Reading, Tags, TextStream
from octavo.chat_formats.tools import Tool

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# The newlines around a value are not part of it.
_VALUE_ENDS = Tags(("\n" + _PARAMETER_END, _PARAMETER_END))
_NAME_ENDS = Tags((">",))
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
        yield from self.read_end(stream, _END)
        message.end_call()

    def _read_function(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        name = yield from self._read_name(stream)
        begin_call(message, name, tools)
        schemas = tools[name].parameters if name in tools else {}
        properties = schemas.get("properties") or {}
        definitions = {key: schemas[key] for key in DEFINITIONS & schemas.keys()}
        message.arguments("{")
        names: set[str] = set()
        while True:
            yield from stream.skip_space()
            if (yield from stream.starts_with(_FUNCTION_END)):
                break
            yield from stream.expect(_PARAMETER)
            key = yield from self._read_name(stream)
            if key in names:
                raise MalformedCall(f"it has the argument {key!r:.80} twice")
            yield from stream.starts_with("\n")
            message.arguments(f'{", " if names else ""}"{json_inside(key)}": ')
            names.add(key)
            schema = properties.get(key)
            schema = {**definitions, **schema} if isinstance(schema, Mapping) else {}
            yield from read_tagged_value(stream, _VALUE_ENDS, schema, message.arguments)
        message.arguments("}")

    def _read_name(self, stream: TextStream) -> Reading[str]:
        parts: list[str] = []
        if not (yield from stream.up_to(_NAME_ENDS, parts.append)):
            raise MalformedCall("the text ends within a name")
        return "".join(parts)

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return grammar.rule(either(self._function(grammar, tool) for tool in tools))

    def _function(self, grammar: Grammar, tool: Tool) -> str:
        parts = [grammar.text(f"\n{_FUNCTION}{tool.name}>\n")]
        for argument in arguments_of(tool, _NAMES, is_lenient=grammar.is_lenient):
            begin = grammar.text(f"{_PARAMETER}{argument.name}>\n")
            end = f"\n{_PARAMETER_END}\n"
            where = f"the argument {argument.name!r} of {tool.name!r}"
            value = tagged_value(grammar, argument.schema, end, where)
            parts.append(f"{begin} {value}" if argument.is_required else f"({begin} {value})?")
        return " ".join([*parts, grammar.text(f"{_FUNCTION_END}\n{_END}")])
