"""The format of Salesforce's xLAM: a JSON list of calls, which is the whole answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import MAX_CALLS, Grammar, more_calls
from octavo.chat_formats.json_calls import (
    call_schema,
    json_call,
    like_a_loose_call,
    loose_json_call,
    read_json_calls,
)
from octavo.chat_formats.json_schemas import DEFINITIONS
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_BEFORE = r"\[[ \n\t]*"


class XLAM(ChatFormat):
    """``[{"name": …, "arguments": {…}}, …]``, without a tag: a call only if a tool has the name."""

    name = "xlam"
    bare_beginnings = "["
    uses_opener = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has("make calls in a single JSON array")

    def read_bare_call(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from read_json_calls(stream, message, tools, is_known=True)
        message.end_call()

    def bare_call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        first = loose_json_call(grammar, tools, before=_BEFORE)
        again = more_calls(f'", " {json_call(grammar, tools)}', are_allowed=parallel)
        return f'{first} {again} {grammar.gap()} "]"'

    def calls_beside_json(
        self, grammar: Grammar, tools: Sequence[Tool], parallel: bool
    ) -> list[str]:
        # Calls of different tools would need one schema with the definitions of all.
        return [
            grammar.json(
                {
                    "type": "array",
                    "items": {key: call[key] for key in call.keys() - DEFINITIONS},
                    "minItems": 1,
                    "maxItems": MAX_CALLS if parallel else 1,
                    **{key: call[key] for key in call.keys() & DEFINITIONS},
                },
                is_loose=True,
            )
            for call in map(call_schema, tools)
        ]

    def like_a_bare_call(self, tools: Sequence[Tool]) -> str:
        return like_a_loose_call(tools, _BEFORE)
