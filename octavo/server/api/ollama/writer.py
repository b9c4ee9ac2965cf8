"""Writers of answers, whole and as lines of a stream, of ``/api/chat`` and ``/api/generate``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from octavo.chat_formats.messages import MessageDelta, ToolCall, ToolCallDelta
from octavo.server.api.chat_answer import AnswerPiece, ChatAnswer
from octavo.server.api.ollama.answers import timestamp
from octavo.server.api.ollama.body import GenerationBody, arguments_of
from octavo.server.api.openai.logprobs import TokenNames, chat_logprobs

Line = dict[str, Any]


class OllamaWriter:
    """Writes one answer. Calls are written when they are whole.

    Args:
        arrival_time: ``time.monotonic()`` when the request came.
    """

    def __init__(
        self, body: GenerationBody, answer: ChatAnswer, names: TokenNames, arrival_time: float
    ):
        self._answer, self._names = answer, names
        self._model = body.model
        self._wants_logprobs = bool(body.logprobs)
        self._arrival_time = arrival_time
        self._call: ToolCall | None = None  # that is not whole yet
        self._num_calls = 0

    def lines(self, piece: AnswerPiece) -> Iterator[Line]:
        """Yield the lines of new parts."""
        shown = self._shown(piece.parts, self._whole_calls(piece.parts.tool_calls))
        logprobs = self._logprobs(piece)
        if shown or logprobs:
            yield self._line(shown, logprobs, done=False)

    def last(self) -> Line:
        """Return the last line, which has the counts and durations."""
        calls = self._whole_calls(())
        return self._line(self._shown(MessageDelta(), calls), {}, done=True) | self._end()

    def whole(self, piece: AnswerPiece) -> Line:
        """Return an answer that is not streamed."""
        calls = [*self._whole_calls(piece.parts.tool_calls), *self._whole_calls(())]
        shown = self._shown(piece.parts, calls)
        return self._line(shown, self._logprobs(piece), done=True) | self._end()

    def about(self, shown: dict[str, Any]) -> Line:
        """Return the fields of a line that have parts of the answer."""
        raise NotImplementedError

    def end(self) -> Line:
        """Return further fields of the last line."""
        return {}

    def _shown(self, parts: MessageDelta, calls: list[Line]) -> dict[str, Any]:
        shown = {"thinking": parts.reasoning, "content": parts.content, "tool_calls": calls}
        return {name: value for name, value in shown.items() if value}

    def _line(self, shown: dict[str, Any], logprobs: Line, *, done: bool) -> Line:
        head = {"model": self._model, "created_at": timestamp(time.time())}
        return {**head, **self.about(shown), "done": done, **logprobs}

    def _logprobs(self, piece: AnswerPiece) -> Line:
        if not self._wants_logprobs or not piece.delta.logprobs:
            return {}
        return {"logprobs": chat_logprobs(piece.delta.logprobs, self._names)["content"]}

    def _whole_calls(self, pieces: Iterable[ToolCallDelta]) -> list[Line]:
        """Return the calls that are whole now; without further pieces, the last one is too."""
        whole, pieces = [], list(pieces)
        for piece in pieces:
            if piece.id:
                whole += self._take_call()
                self._call = ToolCall(piece.id, piece.name, piece.arguments)
            elif self._call is not None:
                self._call.arguments += piece.arguments
        return whole if pieces else self._take_call() if self._answer.finish_reason else []

    def _take_call(self) -> list[Line]:
        call, self._call = self._call, None
        if call is None:
            return []
        self._num_calls += 1
        arguments = arguments_of(call.arguments)
        function = {"index": self._num_calls - 1, "name": call.name, "arguments": arguments}
        return [{"id": call.id, "function": function}]

    def _end(self) -> Line:
        stats = self._answer.stats
        end: Line = {
            "done_reason": self._answer.finish_reason,
            "total_duration": _nanoseconds(time.monotonic() - self._arrival_time),
            "load_duration": 0,  # the model was there
            "prompt_eval_count": stats.num_prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.prefill_time),
            "eval_count": stats.num_output_tokens,
            "eval_duration": _nanoseconds(stats.decode_time),
            **self.end(),
        }
        if self._answer.warnings:
            end["warnings"] = self._answer.warnings
        return end


class ChatWriter(OllamaWriter):
    """Writes an answer of ``/api/chat``."""

    def about(self, shown: dict[str, Any]) -> Line:
        return {"message": {"role": "assistant", "content": "", **shown}}


class GenerateWriter(OllamaWriter):
    """Writes an answer of ``/api/generate``.

    Args:
        gives_context: whether the last line has the tokens of prompt and answer.
    """

    def __init__(self, *arguments: Any, gives_context: bool):
        super().__init__(*arguments)
        self._gives_context = gives_context
        self._token_ids: list[int] = []

    def lines(self, piece: AnswerPiece) -> Iterator[Line]:
        self._token_ids += piece.delta.token_ids
        yield from super().lines(piece)

    def whole(self, piece: AnswerPiece) -> Line:
        self._token_ids += piece.delta.token_ids
        return super().whole(piece)

    def about(self, shown: dict[str, Any]) -> Line:
        thinking = {"thinking": shown["thinking"]} if "thinking" in shown else {}
        return {"response": shown.get("content", ""), **thinking}

    def end(self) -> Line:
        if not self._gives_context:
            return {}
        (generation,) = self._answer.job.generations
        return {"context": [*generation.request.prompt_token_ids, *self._token_ids]}


def _nanoseconds(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1e9)
