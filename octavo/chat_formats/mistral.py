"""Mistral's formats: a JSON list behind ``[TOOL_CALLS]``, and later a name and ``[ARGS]``."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either
from octavo.chat_formats.json_calls import begin_call, json_calls, read_json_calls
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_BEGIN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_ID_LENGTH = 9  # which the templates check


class Mistral(ChatFormat):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``.

    Both formats are read: models of one write the other at times.
    """

    name = "mistral"
    openers = (_BEGIN,)
    closers = (_ARGUMENTS, _ID)
    repeats = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_BEGIN)

    def new_id(self, index: int, name: str) -> str:
        characters = string.ascii_letters + string.digits
        return "".join(secrets.choice(characters) for _ in range(_ID_LENGTH))

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        if (yield from stream.skip_space()) in ("[", "{"):
            yield from read_json_calls(stream, message, tools)
            message.end_call()
            return
        name = yield from stream.matching(_NAME)
        yield from stream.skip_space()
        call_id = ""
        if (yield from stream.starts_with(_ID)):
            call_id = yield from stream.matching(_NAME)
        yield from stream.starts_with(_ARGUMENTS)
        begin_call(message, name, tools, call_id)
        yield from stream.skip_space()
        yield from stream.json_value(message.arguments)
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return f"{grammar.text('[')} {json_calls(grammar, tools, parallel)} {grammar.text(']')}"


class MistralArgs(Mistral):
    """``[TOOL_CALLS]name[ARGS]{…}``, once for each call."""

    name = "mistral-args"
    repeats = True

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_BEGIN, _ARGUMENTS)

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return grammar.rule(
            either(
                f"{grammar.text(tool.name + _ARGUMENTS)} {grammar.json(tool.parameters)}"
                for tool in tools
            )
        )
