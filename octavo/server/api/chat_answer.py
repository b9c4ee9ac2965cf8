"""Answers of chats, read into thoughts, content and tool calls.

`AnswerParsing` reads one answer as it comes. `ChatAnswer` is the whole work of a request with one
answer, for dialects that have no more than one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from starlette.requests import Request

from octavo.chat_formats.messages import MessageDelta
from octavo.core.batch import TokenLogprobs
from octavo.core.prefix_cache import MissReason
from octavo.server.api.chats import Begun
from octavo.server.api.generation_job import MANY_CHARS, check_sample
from octavo.server.api.sampling import context_of
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import GenerationStats
from octavo.server.http.background import in_background
from octavo.server.http.json_text import encode, encode_in_pieces
from octavo.serving.answer_reader import AnswerReader, read_delta
from octavo.serving.outputs import Delta


class AnswerParsing:
    """One answer that is parsed, and what is known of it so far."""

    def __init__(self, reader: AnswerReader):
        self._parser = reader.parser()
        self._count = reader.thought_count()
        self.num_calls = 0
        self.are_thoughts: list[bool] = []  # by token of the last delta
        self._is_merging = False  # within a thought that is shown as content

    def take(self, delta: Delta) -> MessageDelta:
        """Parse a delta."""
        if self._count is not None:
            self.are_thoughts = self._count.add(delta.token_ids)
        parsed = read_delta(self._parser, delta)
        self.num_calls += sum(1 for call in parsed.tool_calls if call.id)
        return parsed

    def merged(self, delta: MessageDelta, begin: str, end: str) -> MessageDelta:
        """Return a delta with its thought as content, between these tags."""
        text = ""
        if delta.reasoning:
            text, self._is_merging = ("" if self._is_merging else begin) + delta.reasoning, True
        if self._is_merging and (delta.content or delta.tool_calls):
            text, self._is_merging = text + end, False
        return MessageDelta("", text + delta.content, delta.tool_calls)

    @property
    def num_thought_tokens(self) -> int:
        return 0 if self._count is None else self._count.num_tokens

    @property
    def has_open_call(self) -> bool:
        return self._parser.has_open_call

    @property
    def warnings(self) -> list[str]:
        return self._parser.warnings

    @property
    def malformed(self) -> list[str]:
        return self._parser.malformed


class AnswerPiece(NamedTuple):
    """New parts of a message, and the delta of the engine that they were read from.

    Args:
        logprobs: those of the delta that are of no thought.
    """

    parts: MessageDelta
    delta: Delta
    logprobs: list[TokenLogprobs]


class ChatAnswer:
    """The only answer of a chat, in pieces, with what is known of it.

    Attributes:
        finish_reason: "stop" or "length", once it is over.
        stop_reason: the stop string or token that ended it, if one has.
    """

    def __init__(self, server: ServerContext, begun: Begun):
        self.job, self.reader = begun
        self._server = server
        self._parsing = AnswerParsing(self.reader)
        self._num_chars = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    async def pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the answer as it comes; raises what ended it otherwise than by a stop or its
        length."""
        async for _, deltas in self.job.updates():
            for delta in deltas:
                yield await self._read(delta)
        self._note()

    async def whole(self, request: Request) -> AnswerPiece:
        """Return the answer in one piece, when it is over. The job is closed."""
        ((completion,),) = await self.job.collect(request)
        piece = await self._read(completion)
        self._note()
        return piece

    async def to_json(self, value: Any) -> str:
        """Return the JSON of an object that holds the answer so far, made where it does not hold up
        the event loop."""
        if self._num_chars > MANY_CHARS:
            return await in_background(encode_in_pieces, value)
        return encode(value)

    @property
    def stats(self) -> GenerationStats:
        """Counts of tokens, as they stand."""
        (generation,) = self.job.generations
        return generation.stats

    @property
    def num_newly_cached_tokens(self) -> int:
        """Number of the prompt's tokens that were not in the prefix cache and are now: whole
        blocks."""
        facts, stats = self._server.engine.facts, self.stats
        if stats.miss_reason == MissReason.OFF.value:
            return 0
        whole = stats.num_prompt_tokens // facts.block_size * facts.block_size
        return max(whole - stats.num_cached_tokens, 0)

    @property
    def fills_context(self) -> bool:
        """True if the context has no room for more than the answer may have."""
        most = self.stats.num_prompt_tokens + (self.job.params.max_tokens or 0)
        return most >= context_of(self._server.engine.facts)

    @property
    def num_thought_tokens(self) -> int:
        return self._parsing.num_thought_tokens

    @property
    def has_calls(self) -> bool:
        """True if there are calls, and none that a stop string has cut off."""
        return self._parsing.num_calls > 0 and not self._parsing.has_open_call

    @property
    def warnings(self) -> list[str]:
        return self._parsing.warnings

    async def _read(self, delta: Delta) -> AnswerPiece:
        check_sample(delta)
        self._num_chars += len(delta.text)
        if len(delta.text) > MANY_CHARS:
            parts = await in_background(self._parsing.take, delta)
        else:
            parts = self._parsing.take(delta)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        logprobs = delta.logprobs
        if logprobs and (flags := self._parsing.are_thoughts):
            logprobs = [entry for entry, flag in zip(logprobs, flags, strict=True) if not flag]
        return AnswerPiece(parts, delta, logprobs)

    def _note(self) -> None:
        note_calls(self._server, self.reader, self._parsing)


def note_calls(server: ServerContext, reader: AnswerReader, parsing: AnswerParsing) -> None:
    """Tell the observer of the calls of an answer, if it has or meant to have any."""
    if parsing.num_calls or parsing.malformed:
        server.observer.on_tool_calls(reader.format.name, parsing.num_calls, parsing.malformed)
