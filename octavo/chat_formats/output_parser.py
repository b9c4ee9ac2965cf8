"""`OutputParser`, which splits the text of an answer into thought, content and tool calls."""

from __future__ import annotations

from octavo.chat_formats.message_writer import MessageWriter
from octavo.chat_formats.messages import MessageDelta, ParsedMessage
from octavo.chat_formats.text_stream import Reading, TextStream


class OutputParser:
    """Parses one answer as its text comes.

    The deltas, joined, are the same however the text is cut into pieces: whole answers are parsed
    by the same code, in one piece.

    Args:
        reading: reads the whole answer from the stream, and tells the message of its parts.
    """

    def __init__(self, stream: TextStream, message: MessageWriter, reading: Reading[None]):
        self._stream = stream
        self._message = message
        self._reading = reading
        self._go_on()

    def push(self, text: str) -> MessageDelta:
        """Take the next piece of text, and return what is certain by now."""
        if text:
            self._stream.feed(text)
            self._go_on()
        return self._message.take()

    def finish(self) -> MessageDelta:
        """End the text, and return what was held back."""
        self._stream.end()
        self._go_on()
        self._message.finish()
        return self._message.take()

    @property
    def is_reasoning(self) -> bool:
        """True within a thought."""
        return self._message.is_reasoning

    @property
    def has_open_call(self) -> bool:
        """True if the last call has left in part, and was cut off."""
        return self._message.has_open_call

    @property
    def warnings(self) -> list[str]:
        """Sentences on what was not as it should be."""
        return self._message.warnings

    @property
    def malformed(self) -> list[str]:
        """Why calls were none, one reason a call: see `MalformedCall`."""
        return self._message.malformed

    def _go_on(self) -> None:
        next(self._reading, None)


def parse_whole(parser: OutputParser, text: str) -> ParsedMessage:
    """Return the message of a whole text."""
    message = ParsedMessage(warnings=parser.warnings)
    message.add(parser.push(text))
    message.add(parser.finish())
    return message
