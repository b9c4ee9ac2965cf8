"""InternLM's format: one JSON call for the plugin that runs tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar
from octavo.chat_formats.json_calls import json_call, read_json_calls
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_BEGIN, _PLUGIN, _END = "<|action_start|>", "<|plugin|>", "<|action_end|>"


class InternLM(ChatFormat):
    """``<|action_start|><|plugin|>\\n{"name": …, "parameters": {…}}<|action_end|>``, of InternLM 2
    and 3, and InternVL. There is one call in a message."""

    name = "internlm"
    openers = (_BEGIN,)
    closers = (_PLUGIN, _END)
    repeats = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_BEGIN)

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from stream.starts_with(_PLUGIN)
        yield from stream.skip_space()
        yield from read_json_calls(stream, message, tools)
        yield from self.read_end(stream, _END)
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        key = "arguments" if self.template.has('"arguments"') else "parameters"
        begin = grammar.text(f"{_PLUGIN}\n")
        return f"{begin} {json_call(grammar, tools, key)} {grammar.text(_END)}"
