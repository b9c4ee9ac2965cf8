"""The format of Cohere's Command R7B and Command A: a list of actions, or a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.grammar import Grammar, either, literal, more_calls
from octavo.chat_formats.json_calls import read_json_calls
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool

_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"
_LINE = r"(\n {0,4}|[ ])?"  # between the parts of a list: each on a line of its own, or not
_RESPONSES = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),  # of later models
)


class Command(ChatFormat):
    """``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]``, with a tag
    at its end; content is a response between tags of its own.

    The template numbers the calls of earlier messages itself, so that these ids say nothing.
    """

    name = "command"
    openers = (_BEGIN,)
    closers = (_END,)
    marks = tuple(tag for tags in _RESPONSES for tag in tags)
    repeats = False

    @classmethod
    def fits(cls, template: Template) -> bool:
        return template.has(_BEGIN)

    @property
    def before_content(self) -> str:
        return self._response[0]

    @property
    def _response(self) -> tuple[str, str]:
        """The tags around a response, as the template writes them."""
        return next((tags for tags in _RESPONSES if self.template.has(tags[0])), _RESPONSES[0])

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        yield from stream.skip_space()
        yield from read_json_calls(stream, message, tools, name_key="tool_name")
        yield from self.read_end(stream, _END)
        message.end_call()

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        number, line = grammar.pattern('"[0-9]{1,3}"'), grammar.pattern(_LINE)
        id_key = literal('{"tool_call_id": ')

        def call(tool: Tool) -> str:
            rest = literal(f', "tool_name": "{tool.name}", "parameters": ')
            return f'{id_key} {number} {rest} {grammar.json(tool.parameters)} "}}"'

        calls = grammar.rule(either(map(call, tools)))
        again = more_calls(f'"," {line} {calls}', are_allowed=parallel)
        return f'"[" {line} {calls} {again} {line} "]" {grammar.text(_END)}'

    def _content(
        self, grammar: Grammar, tools: Sequence[Tool], parallel: bool, known: Sequence[Tool]
    ) -> str:
        begin, end = self._response
        tags = frozenset((*self.openers, *self.closers, *self.marks, *(self.thoughts or ())))
        options = [
            f"{grammar.after_gap(begin)} {grammar.free(tags)} ({grammar.text(end)})?",
            grammar.free(tags),
        ]
        if tools:
            options.append(f"{grammar.gap()} {self._calls(grammar, tools, parallel)}")
        return f"{self._own_thought(grammar)} {either(options)}"
