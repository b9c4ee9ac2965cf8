"""Messages that are parsed from a model's text, whole and as deltas of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one tool call.

    Args:
        index: of the call in its message.
        id, name: with the first delta of a call; else empty.
        arguments: the next piece of the text of a JSON object.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """The parts of a message that have come since the last delta."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclass(slots=True)
class ToolCall:
    """A whole call; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class MessageExtent(NamedTuple):
    """The length of a message at some moment: characters, calls, and characters of the arguments
    of the last one."""

    reasoning: int = 0
    content: int = 0
    calls: int = 0
    arguments: int = 0


@dataclass(slots=True)
class ParsedMessage:
    """The parts of one answer.

    Args:
        reasoning, content: None where there is no such text.
        warnings: sentences on what was not as it should be, such as a malformed call.
    """

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, delta: MessageDelta) -> None:
        """Append a delta."""
        if delta.reasoning:
            self.reasoning = (self.reasoning or "") + delta.reasoning
        if delta.content:
            self.content = (self.content or "") + delta.content
        for piece in delta.tool_calls:
            if piece.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(piece.id, piece.name, piece.arguments))
            else:
                self.tool_calls[piece.index].arguments += piece.arguments

    @property
    def extent(self) -> MessageExtent:
        """The length so far."""
        calls = self.tool_calls
        return MessageExtent(
            len(self.reasoning or ""),
            len(self.content or ""),
            len(calls),
            len(calls[-1].arguments) if calls else 0,
        )

    def up_to(self, extent: MessageExtent) -> ParsedMessage:
        """Return a copy of the message as it was when it had this extent."""
        calls = [replace(call) for call in self.tool_calls[: extent.calls]]
        if calls:
            calls[-1].arguments = calls[-1].arguments[: extent.arguments]
        reasoning = (self.reasoning or "")[: extent.reasoning]
        content = (self.content or "")[: extent.content]
        return ParsedMessage(reasoning or None, content or None, calls, self.warnings)
