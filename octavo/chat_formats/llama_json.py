"""Llama 3's calls in JSON, without a tag before them or with ``<|python_tag|>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, more_calls
from octavo.chat_formats.json_calls import (
    call_schema,
    json_call,
    like_a_loose_call,
    loose_json_call,
    read_json_calls,
)
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_TAG = "<|python_tag|>"
_KEY = "parameters"
_SEPARATOR = '"; "'


class LlamaJSON(ChatFormat):
    """``{"name": …, "parameters": {…}}``, which is the whole answer; several have ``;`` between
    them.

    Without the tag it is a call only if a tool has the name.
    """

    name = "llama-json"
    openers = (_TAG,)
    bare_beginnings = "{"
    uses_opener = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return (
            template.has(_TAG)
            or template.has('"parameters": dictionary of argument name')
            or template.has("<|start_header_id|>", '"parameters": ')
        )

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from self._read_calls(stream, message, tools, is_known=False)

    def read_bare_call(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from self._read_calls(stream, message, tools, is_known=True)

    def _read_calls(
        self,
        stream: TextStream,
        message: MessageWriter,
        tools: Mapping[str, Tool],
        *,
        is_known: bool,
    ) -> Reading[None]:
        while True:
            yield from stream.skip_space()
            yield from read_json_calls(stream, message, tools, is_known=is_known)
            message.end_call()
            if (yield from stream.skip_space()) not in (";", "{"):
                return
            yield from stream.starts_with(";")

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = json_call(grammar, tools, _KEY)
        return f"{call} {more_calls(f'{_SEPARATOR} {call}', are_allowed=parallel)}"

    def bare_call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = loose_json_call(grammar, tools, _KEY)
        again = f"{_SEPARATOR} {json_call(grammar, tools, _KEY)}"
        return f"{call} {more_calls(again, are_allowed=parallel)}"

    def calls_beside_json(
        self, grammar: Grammar, tools: Sequence[Tool], parallel: bool
    ) -> list[str]:
        return [grammar.json(call_schema(tool, _KEY), is_loose=True) for tool in tools]

    def like_a_bare_call(self, tools: Sequence[Tool]) -> str:
        return like_a_loose_call(tools)
