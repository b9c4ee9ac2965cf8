"""`MessageWriter`, which writes the message of one answer, and the events of its stream."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from typing import Any

from octavo.chat_formats.messages import ToolCallDelta
from octavo.server.api.anthropic.body import MessagesRequest
from octavo.server.api.chat_answer import AnswerPiece, ChatAnswer

Event = dict[str, Any]


class ContentBlock:
    """One block of the content, as far as it has come.

    Attributes:
        value: the block as answers have it.
    """

    def __init__(self, index: int, **value: Any):
        self.index = index
        self.value = value
        self._pieces: list[str] = []

    def begin(self) -> Iterator[Event]:
        """Yield the event of its begin."""
        block = {**self.value}
        yield {"type": "content_block_start", "index": self.index, "content_block": block}

    def end(self) -> Iterator[Event]:
        """Yield the events of its end."""
        yield {"type": "content_block_stop", "index": self.index}

    def _delta(self, kind: str, **fields: Any) -> Event:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


class TextContent(ContentBlock):
    """Text of the answer."""

    def __init__(self, index: int):
        super().__init__(index, type="text", text="")

    def add(self, text: str) -> Iterator[Event]:
        """Yield the event of more text."""
        self._pieces.append(text)
        yield self._delta("text_delta", text=text)

    def end(self) -> Iterator[Event]:
        self.value["text"] = "".join(self._pieces)
        yield from super().end()


class ThinkingContent(ContentBlock):
    """A thought, with a signature that clients expect to be there."""

    def __init__(self, index: int, *, is_shown: bool):
        super().__init__(index, type="thinking", thinking="", signature="")
        self._is_shown = is_shown

    def add(self, text: str) -> Iterator[Event]:
        """Yield the event of more of the thought."""
        self._pieces.append(text)
        if self._is_shown:
            yield self._delta("thinking_delta", thinking=text)

    def end(self) -> Iterator[Event]:
        thought = "".join(self._pieces)
        signature = hashlib.sha256(thought.encode()).hexdigest()
        self.value |= {"thinking": thought if self._is_shown else "", "signature": signature}
        yield self._delta("signature_delta", signature=signature)
        yield from super().end()


class ToolUseContent(ContentBlock):
    """A call of a tool."""

    def __init__(self, index: int, call: ToolCallDelta):
        super().__init__(index, type="tool_use", id=call.id, name=call.name, input={})
        self.call = call.index

    def add(self, arguments: str) -> Iterator[Event]:
        """Yield the event of more of its input."""
        self._pieces.append(arguments)
        yield self._delta("input_json_delta", partial_json=arguments)

    def end(self) -> Iterator[Event]:
        try:
            self.value["input"] = json.loads("".join(self._pieces))
        except (ValueError, RecursionError):  # the answer is cut off
            self.value["input"] = {}
        yield from super().end()


class MessageWriter:
    """Writes one answer.

    Attributes:
        message: the object as it stands.
    """

    def __init__(self, model: str, body: MessagesRequest, answer: ChatAnswer):
        self._body, self._answer = body, answer
        self._shows_thoughts = body.thinking is None or body.thinking.display != "omitted"
        self._marks_prefixes = body.marks_prefixes
        self._open: ContentBlock | None = None
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self) -> Iterator[Event]:
        """Yield the events that a stream begins with."""
        message = {**self.message, "content": [], "usage": self._usage()}
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def add(self, piece: AnswerPiece) -> Iterator[Event]:
        """Yield the events of new parts."""
        parts = piece.parts
        if parts.reasoning:
            if not isinstance(self._open, ThinkingContent):
                yield from self._begin(ThinkingContent(self._next, is_shown=self._shows_thoughts))
            assert isinstance(self._open, ThinkingContent)
            yield from self._open.add(parts.reasoning)
        if parts.content:
            if not isinstance(self._open, TextContent):
                yield from self._begin(TextContent(self._next))
            assert isinstance(self._open, TextContent)
            yield from self._open.add(parts.content)
        for call in parts.tool_calls:
            if not isinstance(self._open, ToolUseContent) or self._open.call != call.index:
                yield from self._begin(ToolUseContent(self._next, call))
            assert isinstance(self._open, ToolUseContent)
            if call.arguments:
                yield from self._open.add(call.arguments)

    def end(self) -> Iterator[Event]:
        """Yield the events of the end."""
        yield from self._close()
        reason, sequence = self._stop()
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        self.message |= {**stop, "usage": self._usage()}
        yield {"type": "message_delta", "delta": stop, "usage": self.message["usage"]}
        yield {"type": "message_stop"}

    @property
    def _next(self) -> int:
        """The index of the next block."""
        return 0 if self._open is None else self._open.index + 1

    def _begin(self, block: ContentBlock) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self.message["content"].append(block.value)
        yield from block.begin()

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end()

    def _stop(self) -> tuple[str, str | None]:
        """Return why the answer has ended, and the stop sequence that has ended it."""
        answer = self._answer
        if answer.finish_reason == "length":
            is_full = answer.fills_context and self._was_cut_short
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        return ("tool_use" if answer.has_calls else "end_turn"), None

    @property
    def _was_cut_short(self) -> bool:
        """True if the answer might have had more tokens, had there been room."""
        return (self._answer.job.params.max_tokens or 0) < self._body.max_tokens

    def _usage(self) -> dict[str, Any]:
        """Return the usage. Tokens that are in the prefix cache since this request count as such
        only where the client has marked a prefix, as it else does not know of any."""
        stats = self._answer.stats
        created = self._answer.num_newly_cached_tokens if self._marks_prefixes else 0
        cached = stats.num_cached_tokens
        return {
            "input_tokens": stats.num_prompt_tokens - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": stats.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self._answer.num_thought_tokens},
        }
