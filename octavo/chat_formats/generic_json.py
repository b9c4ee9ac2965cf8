"""The format for templates that know no tools: one JSON object with all calls of a message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import MAX_CALLS, Grammar
from octavo.chat_formats.json_calls import (
    call_schema,
    earlier_call,
    json_calls,
    read_json_calls,
)
from octavo.chat_formats.json_schemas import DEFINITIONS
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_KEY = "tool_calls"
_OPENING, _CLOSING = f'{{"{_KEY}": [', "]}"
_INSTRUCTIONS = """You may call these tools:
{tools}

To call tools, answer with this JSON object and nothing else:
{{"tool_calls": [{{"name": "<name of the tool>", "arguments": {{<its arguments>}}}}]}}
Else answer in plain text. Results of tools come in the next message."""


class GenericJSON(ChatFormat):
    """``{"tool_calls": [{"name": …, "arguments": {…}}, …]}`` instead of any other answer.

    A template that knows no tools is given none: `prompt` writes them, earlier calls and their
    results into messages. One that does, in a way of its own, writes them itself; so does one that
    knows calls of earlier messages alone.
    """

    name = "generic-json"
    bare_beginnings = "{"
    uses_opener = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return True

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]] | None]:
        if self.template.has("tools"):
            return super().prompt(messages, tools)
        written = list(messages)
        if not self.template.has("tool_calls"):
            written = [_plain_message(message) for message in messages]
        if not tools:
            return written, None
        lines = "\n".join(
            json.dumps(tool.to_dict()["function"], ensure_ascii=False) for tool in tools
        )
        text = _INSTRUCTIONS.format(tools=lines)
        if written and written[0].get("role") == "system":
            content = written[0].get("content") or ""
            if not isinstance(content, str):
                content = "\n".join(part.get("text", "") for part in content)
            written[0] = {**written[0], "content": f"{content}\n\n{text}".strip()}
        else:
            written.insert(0, {"role": "system", "content": text})
        return written, None

    def read_bare_call(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.expect("{")
        yield from stream.skip_space()
        yield from stream.expect(f'"{_KEY}"')
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        yield from read_json_calls(stream, message, tools, is_known=True)
        yield from stream.skip_space()
        yield from stream.expect("}")
        message.end_call()

    def bare_call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        calls = json_calls(grammar, tools, parallel)
        return f"{grammar.after_gap(_OPENING)} {calls} {grammar.text(_CLOSING)}"

    def calls_beside_json(
        self, grammar: Grammar, tools: Sequence[Tool], parallel: bool
    ) -> list[str]:
        # Calls of different tools would need one schema with the definitions of all.
        return [
            grammar.json(
                {
                    "type": "object",
                    "properties": {
                        _KEY: {
                            "type": "array",
                            "items": {key: call[key] for key in call.keys() - DEFINITIONS},
                            "minItems": 1,
                            "maxItems": MAX_CALLS if parallel else 1,
                        }
                    },
                    "required": [_KEY],
                    "additionalProperties": False,
                    **{key: call[key] for key in call.keys() & DEFINITIONS},
                },
                is_loose=True,
            )
            for call in map(call_schema, tools)
        ]

    def like_a_bare_call(self, tools: Sequence[Tool]) -> str:
        return r'\s*\{\s*"tool_calls"(?s:.*)'


def _plain_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write the calls of a message, or the result of one, as text."""
    if message.get("role") == "tool":
        content = message.get("content")
        result = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        name = message.get("name") or message.get("tool_call_id") or ""
        return {"role": "user", "content": f"Result of the tool {name}:\n{result}".strip()}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = json.dumps({_KEY: [earlier_call(call) for call in calls]}, ensure_ascii=False)
    content = message.get("content")
    text = f"{content}\n{written}" if isinstance(content, str) and content else written
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": text}
