"""`run_tool_loop`, in which a model calls tools until it answers."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from octavo.agents.toolbox import Toolbox, ToolResult
from octavo.chat_formats.messages import ParsedMessage, ToolCall

DEFAULT_MAX_TURNS = 8

_REFUSED = ToolResult("error: the user refused this call", is_error=True)
_INTERRUPTED = ToolResult("error: the user interrupted this call", is_error=True)
_NOT_MADE = ToolResult("error: this call was not made: the user interrupted", is_error=True)


class ToolLoopHost(Protocol):
    """The model, and the user who agrees to calls."""

    def answer(self, messages: list[dict[str, Any]]) -> ParsedMessage | None:
        """Have the model answer a conversation, and show the answer.

        Returns:
            The answer; None if it was interrupted or failed, which ends the loop.
        """

    def allows(self, call: ToolCall) -> bool:
        """Show a call, and tell whether it may be made."""

    def show(self, call: ToolCall, result: ToolResult) -> None:
        """Show what a call came to."""


class LoopEnd(Enum):
    """Why a loop ended."""

    ANSWERED = "the model answered"
    STOPPED = "the answer was interrupted, or failed"
    INTERRUPTED = "a call was interrupted"
    TOO_MANY_TURNS = "the model called tools in every turn"


def run_tool_loop(
    messages: list[dict[str, Any]],
    host: ToolLoopHost,
    toolbox: Toolbox,
    *,
    max_turns: int = DEFAULT_MAX_TURNS,
) -> LoopEnd:
    """Have a model answer, with its calls of tools made and their results given to it.

    Calls of one answer are made one after the other. An interrupt (``KeyboardInterrupt``) of a call
    or of the question whether to make it ends the loop.

    Args:
        messages: the conversation; answers and results are added to it as they come, so that it is
            whole whenever the loop ends: every call in it has a result.
        max_turns: the number of answers after which no more calls are made.
    """
    for _ in range(max_turns):
        answer = host.answer(messages)
        if answer is None:
            return LoopEnd.STOPPED
        messages.append(message_of(answer))
        if not answer.tool_calls:
            return LoopEnd.ANSWERED
        if _make_calls(messages, answer.tool_calls, host, toolbox):
            return LoopEnd.INTERRUPTED
    return LoopEnd.TOO_MANY_TURNS


def _make_calls(
    messages: list[dict[str, Any]], calls: list[ToolCall], host: ToolLoopHost, toolbox: Toolbox
) -> bool:
    """Add the result of each call.

    Returns:
        True if they were interrupted.
    """
    is_interrupted = False
    for call in calls:
        result = _NOT_MADE
        if not is_interrupted:
            try:
                result = toolbox.call(call) if host.allows(call) else _REFUSED
            except KeyboardInterrupt:
                is_interrupted, result = True, _INTERRUPTED
            host.show(call, result)
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
        )
    return is_interrupted


def message_of(answer: ParsedMessage) -> dict[str, Any]:
    """Return an answer as a message of the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or ""}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
    return message
