"""`ChatChoiceWriter`, which writes answers of chats: their thoughts, content and tool calls."""

from __future__ import annotations

from typing import Any

from octavo.chat_formats.messages import MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from octavo.server.api.chat_answer import AnswerParsing, note_calls
from octavo.server.api.chats import Begun
from octavo.server.api.openai.chat_body import ChatCompletionRequest
from octavo.server.api.openai.choices import ChoiceWriter
from octavo.server.api.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.api.server_context import ServerContext
from octavo.serving.outputs import Delta


class ChatChoiceWriter(ChoiceWriter):
    """Writes the choices of one chat."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        server: ServerContext,
        fields: ChatCompletionRequest,
        chat: Begun,
    ):
        super().__init__(server, fields, chat.job)
        self._server, self._reader = server, chat.reader
        self._shows_thoughts = fields.include_reasoning is not False
        self._merges_thoughts = fields.separate_reasoning is False
        self._parsings: dict[int, AnswerParsing] = {}
        self._parsed = MessageDelta()  # by ``shows``, of the delta that is to be written next

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self._reader.thoughts is not None:
            counts = (each.num_thought_tokens for each in self._parsings.values())
            details = usage.setdefault("completion_tokens_details", {})
            details["reasoning_tokens"] = sum(counts)
        return usage

    def first(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def shows(self, index: int, delta: Delta) -> bool:
        self._parsed = self._shown(self._parse(index, delta), index)
        return bool(self._parsed)

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        parsed = self._parsed
        shown: dict[str, Any] = {}
        if parsed.reasoning:
            shown |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
        if parsed.content:
            shown["content"] = parsed.content
        if parsed.tool_calls:
            shown["tool_calls"] = [_piece_of_call(call) for call in parsed.tool_calls]
        return {
            "delta": shown,
            "logprobs": self._logprobs(index, delta) if delta.logprobs else None,
            **self._end(index, delta),
        }

    def message(self, index: int, completion: Delta) -> dict[str, Any]:
        parsed = ParsedMessage()
        parsed.add(self._shown(self._parse(index, completion), index))
        wants_logprobs = self._job.params.logprobs is not None
        logprobs = self._logprobs(index, completion) if wants_logprobs else None
        has_parts = parsed.tool_calls or parsed.reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parsed.content or (None if has_parts else ""),
            "refusal": None,
        }
        if parsed.reasoning:
            message |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
        if parsed.tool_calls:
            message["tool_calls"] = [_call(call) for call in parsed.tool_calls]
        return {"message": message, "logprobs": logprobs, **self._end(index, completion)}

    def _logprobs(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the object of all tokens that were generated, but for thoughts that are left
        out."""
        entries = delta.logprobs
        if not self._shows_thoughts and (flags := self._parsings[index].are_thoughts):
            entries = [entry for entry, flag in zip(entries, flags, strict=True) if not flag]
        return chat_logprobs(entries, self._names)

    def about_prompt(self) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        (generation,) = self._job.generations
        if self._fields.return_token_ids:
            extra["prompt_token_ids"] = generation.request.prompt_token_ids
        if self._fields.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs, self._names)
        return extra

    def finish(self) -> None:
        for parsing in self._parsings.values():
            note_calls(self._server, self._reader, parsing)

    def _parse(self, index: int, delta: Delta) -> MessageDelta:
        if index not in self._parsings:
            self._parsings[index] = AnswerParsing(self._reader)
        return self._parsings[index].take(delta)

    def _shown(self, delta: MessageDelta, index: int) -> MessageDelta:
        """Return what a request wants to see of new output."""
        if self._merges_thoughts and self._reader.format.thoughts is not None:
            begin, end = self._reader.format.thoughts
            return self._parsings[index].merged(delta, begin, end)
        return delta if self._shows_thoughts else MessageDelta("", delta.content, delta.tool_calls)

    def _end(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the finish_reason, if tools are called, and warnings, with the last delta."""
        if delta.finish_reason is None:
            return {}
        parsing = self._parsings[index]
        end: dict[str, Any] = {}
        # A stop string may cut off a call, which is not to be made then.
        if parsing.num_calls and delta.finish_reason == "stop" and not parsing.has_open_call:
            end["finish_reason"] = "tool_calls"
        if parsing.warnings:
            end["warnings"] = parsing.warnings
        return end


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _piece_of_call(call: ToolCallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
