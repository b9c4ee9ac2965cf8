"""`ResponseWriter`, which writes the response object of one answer, and the events of its
stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from octavo.chat_formats.messages import MessageDelta, ToolCallDelta
from octavo.server.api.chat_answer import AnswerPiece, ChatAnswer
from octavo.server.api.openai.logprobs import TokenNames, chat_logprobs
from octavo.server.api.openai.responses.body import ResponsesRequest
from octavo.server.api.openai.responses.output import (
    CallItem,
    CustomCallItem,
    Event,
    MessageItem,
    OutputItem,
    ThoughtItem,
)
from octavo.server.http.errors import error_body, to_http_error


class ResponseWriter:
    """Writes one answer.

    Attributes:
        response: the object as it stands.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        body: ResponsesRequest,
        answer: ChatAnswer,
        names: TokenNames,
        *,
        is_kept: bool,
    ):
        self._body, self._answer, self._names = body, answer, names
        self._customs = body.custom_tools
        self._open: OutputItem | None = None
        self._call = -1  # index of the call that is open
        self._logprobs: list[dict[str, Any]] = []  # of text that has not come yet
        self.response = _first(response_id, model, body, answer, is_kept)

    def begin(self) -> Iterator[Event]:
        """Yield the events that a stream begins with."""
        for kind in ("created", "in_progress"):
            yield f"response.{kind}", {"response": {**self.response, "output": []}}

    def add(self, piece: AnswerPiece) -> Iterator[Event]:
        """Yield the events of new parts."""
        self._logprobs += chat_logprobs(piece.logprobs, self._names)["content"]
        yield from self._add_text(piece.parts)
        for call in piece.parts.tool_calls:
            yield from self._add_call(call)

    def end(self) -> Iterator[Event]:
        """Yield the events of the end."""
        is_cut = self._answer.finish_reason == "length"
        if self._open is None and not self.response["output"]:
            yield from self._begin(MessageItem(0))  # clients look for a message
        yield from self._close("incomplete" if is_cut else "completed")
        status = self.response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = self._usage()
        self.response["timings"] = self._answer.job.timings()
        if self._answer.warnings:
            self.response["warnings"] = self._answer.warnings
        yield f"response.{status}", {"response": self.response}

    def fail(self, error: BaseException) -> Event:
        """Return the event of an error, with which the answer ends."""
        described = error_body(to_http_error(error))["error"]
        code = described["code"] or described["type"]
        known = {
            "rate_limit_error": "rate_limit_exceeded",
            "invalid_request_error": "invalid_prompt",
        }
        self.response["status"] = "failed"
        self.response["error"] = {
            "code": known.get(code, "server_error"),
            "message": described["message"],
        }
        self.response["usage"] = self._usage()
        return "response.failed", {"response": self.response}

    def cancel(self) -> None:
        """End the answer where it stands."""
        for _ in self._close("incomplete"):
            pass
        self.response["status"] = "cancelled"
        self.response["usage"] = self._usage()

    # -- items -------------------------------------------------------------------------------------

    def _add_text(self, parts: MessageDelta) -> Iterator[Event]:
        if parts.reasoning:
            if not isinstance(self._open, ThoughtItem):
                encrypts = self._body.wants_encrypted_reasoning
                yield from self._begin(ThoughtItem(self._next, encrypts=encrypts))
            assert isinstance(self._open, ThoughtItem)
            yield from self._open.add(parts.reasoning)
        if parts.content:
            if not isinstance(self._open, MessageItem):
                yield from self._begin(MessageItem(self._next))
            assert isinstance(self._open, MessageItem)
            self._open.add_logprobs(self._logprobs)
            self._logprobs = []
            yield from self._open.add(parts.content)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.index != self._call:
            self._call = call.index
            kind = CustomCallItem if call.name in self._customs else CallItem
            yield from self._begin(kind(self._next, call))
        assert isinstance(self._open, CallItem | CustomCallItem)
        if call.arguments:
            yield from self._open.add(call.arguments)

    @property
    def _next(self) -> int:
        """The index of the next item."""
        return len(self.response["output"]) + (self._open is not None)

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self.response["output"].append(self._open.value)
            self._open = None

    def _usage(self) -> dict[str, Any]:
        stats = self._answer.stats
        return {
            "input_tokens": stats.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": stats.num_cached_tokens,
                "cache_write_tokens": self._answer.num_newly_cached_tokens,
            },
            "output_tokens": stats.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_thought_tokens},
            "total_tokens": stats.num_prompt_tokens + stats.num_output_tokens,
        }


def _first(
    response_id: str, model: str, body: ResponsesRequest, answer: ChatAnswer, is_kept: bool
) -> dict[str, Any]:
    """Return the object before it has an answer."""
    params = answer.job.params
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": is_kept,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": _format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.shown() for tool in body.tools or ()],
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        "user": None,
        "safety_identifier": None,
        "prompt_cache_key": None,
        "usage": None,
    }


def _format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)
