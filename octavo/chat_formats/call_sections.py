"""`CallSections`, formats with a tag around all calls of a message and one around each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from octavo.chat_formats.chat_format import ChatFormat
from octavo.chat_formats.grammar import Grammar, either, more_calls
from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.text_stream import Reading, TextStream
from octavo.chat_formats.tools import Tool


class CallSections(ChatFormat):
    """A section of calls. Models leave out the tags around it at times: its calls are read anyway.

    A format gives ``openers``, the beginnings of a section and of a call; ``closers``, their ends
    in the same order, and what other tags there are; ``separator``, the text between calls;
    `read_one` and `one`.
    """

    repeats = False
    separator: ClassVar[str] = ""

    def read_one(
        self, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        """Read what is between the tags of a call, which has not ended then."""
        raise NotImplementedError

    def one(self, grammar: Grammar, tool: Tool) -> str:
        """Return the grammar of what is between the tags of a call."""
        raise NotImplementedError

    def read_call(
        self, opener: str, stream: TextStream, message: MessageWriter, tools: Mapping[str, Tool]
    ) -> Reading[None]:
        section, begin = self.openers
        if opener == section:
            yield from stream.skip_space()
            yield from stream.expect(begin)
        while True:
            yield from stream.skip_space()
            yield from self.read_one(stream, message, tools)
            yield from self.read_end(stream, self.closers[1])
            message.end_call()
            yield from stream.skip_space()
            if not (yield from stream.starts_with(begin)):
                return

    def call(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        begin, (section_end, end) = self.openers[1], self.closers[:2]

        calls = grammar.rule(
            either(f"{self.one(grammar, tool)} {grammar.text(end)}" for tool in tools)
        )
        again = more_calls(f"{grammar.text(self.separator + begin)} {calls}", are_allowed=parallel)
        return f"{grammar.text(begin)} {calls} {again} {grammar.text(section_end)}"
