"""Calls as Python writes them: lists of Llama 3.2 and 4, and of LFM2, and lines of OLMo 3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, more_calls
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.python_calls import (
    python_call,
    python_calls,
    read_python_call,
    read_python_calls,
)
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_LFM_BEGIN, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"


class Pythonic(ChatFormat):
    """``[f(x=1), g(y='a')]``, which is the whole answer.

    Without a tag before it, it is a call only if a tool has the name.
    """

    name = "pythonic"
    openers = ("<|python_start|>", "<|python_tag|>")
    closers = ("<|python_end|>",)
    bare_beginnings = "["
    uses_opener = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return any(text in template.source for text in ("[func_name1(", "[func1("))

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from read_python_calls(stream, message, tools, is_known=False)
        message.end_call()

    def read_bare_call(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from read_python_calls(stream, message, tools, is_known=True)
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return f"{python_calls(grammar, tools, parallel)} {grammar.text(self.closers[0])}"

    def bare_call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return python_calls(grammar, tools, parallel, is_bare=True)

    def like_a_bare_call(self, tools: Sequence[Tool]) -> str:
        names = "|".join(re.escape(tool.name) for tool in tools)
        return rf"\s*\[\s*({names})\((?s:.*)"


class TaggedPythonic(ChatFormat):
    """LFM2's list of calls between tags."""

    name = "tagged-pythonic"
    repeats = False
    openers = (_LFM_BEGIN,)
    closers = (_LFM_END,)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has("<|tool_list_start|>") or template.has(_LFM_BEGIN)

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from read_python_calls(stream, message, tools, is_known=False)
        yield from self.read_end(stream, _LFM_END)
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return f"{python_calls(grammar, tools, parallel)} {grammar.text(_LFM_END)}"


class Olmo3(ChatFormat):
    """``<function_calls>``, a call in each line, and ``</function_calls>``."""

    name = "olmo-3"
    openers = ("<function_calls>",)
    closers = ("</function_calls>",)
    repeats = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(*cls.openers)

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        while True:
            yield from read_python_call(stream, message, tools, is_known=False)
            following = yield from stream.skip_space()
            if not following or following == "<":
                break
            message.end_call()
        yield from self.read_end(stream, self.closers[0])
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = f"{grammar.text(chr(10))} {python_call(grammar, tools)}"
        again = more_calls(call, are_allowed=parallel)
        return f"{call} {again} {grammar.text(chr(10) + self.closers[0])}"
