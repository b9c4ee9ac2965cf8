"""Formats with one list of JSON calls behind a tag: Granite 3, Phi-4-mini, Nemotron and others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar
from octavo.chat_formats.json_calls import earlier_call, json_calls, read_json_calls
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_FUNCTOOLS = "functools"


class JSONList(ChatFormat):
    """A tag, ``[{"name": …, "arguments": {…}}, …]``, and the tag that ends it, if there is one."""

    repeats = False

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]] | None]:
        written, given = super().prompt(messages, tools)
        if not self.template.has("tool_calls"):  # it would leave them out
            written = [self._with_calls_in_content(message) for message in written]
        return written, given

    def _with_calls_in_content(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not calls:
            return message
        listed = json.dumps([earlier_call(call) for call in calls], ensure_ascii=False)
        content = "".join((message.get("content") or "", self.openers[0], listed, *self.closers))
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**kept, "content": content}

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from read_json_calls(stream, message, tools)
        while (yield from stream.skip_space()) == "{":  # MiniMax M1 writes one behind the other
            message.end_call()
            yield from read_json_calls(stream, message, tools)
        for end in self.closers:
            yield from self.read_end(stream, end)
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        end = "".join(("]", *self.closers))
        return f"{grammar.text('[')} {json_calls(grammar, tools, parallel)} {grammar.text(end)}"


class Granite3(JSONList):
    """``<|tool_call|>[…]``, which is all that follows. Granite 4 writes Hermes' format."""

    name = "granite-3"
    openers = ("<|tool_call|>",)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has("<|tool_call|>")


class Phi4Mini(JSONList):
    """``<|tool_call|>[…]<|/tool_call|>``; or ``functools[…]``, with which an answer begins."""

    name = "phi-4-mini"
    openers = ("<|tool_call|>",)
    closers = ("<|/tool_call|>",)
    bare_beginnings = _FUNCTOOLS[0]

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has("<|tool|>", "<|/tool|>")

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]] | None]:
        written, given = super().prompt(messages, tools)
        if given is None or not self.template.has("message['tools']"):
            return written, given
        # The template takes them from the first message, as text.
        if not written or written[0].get("role") != "system":
            written.insert(0, {"role": "system", "content": ""})
        listed = json.dumps([tool["function"] for tool in given], ensure_ascii=False)
        written[0] = {**written[0], "tools": listed}
        return written, None

    def read_bare_call(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.expect(_FUNCTOOLS)
        yield from stream.skip_space()
        yield from read_json_calls(stream, message, tools, is_known=True)
        message.end_call()

    def bare_call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        calls = json_calls(grammar, tools, parallel)
        return f"{grammar.after_gap(_FUNCTOOLS + '[')} {calls} {grammar.text(']')}"

    def like_a_bare_call(self, tools: Sequence[Tool]) -> str:
        return rf"\s*{_FUNCTOOLS}\s*[\[{{](?s:.*)"


class Nemotron(JSONList):
    """``<TOOLCALL>[…]</TOOLCALL>``, of Nemotron Nano 2 and the Llama Nemotrons."""

    name = "nemotron"
    openers = ("<TOOLCALL>",)
    closers = ("</TOOLCALL>",)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(*cls.openers)


class ToolCallsList(JSONList):
    """``<tool_calls>[…]</tool_calls>``, of Jamba, Hunyuan, Apriel and MiniMax M1."""

    name = "tool-calls-list"
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(*cls.openers)
