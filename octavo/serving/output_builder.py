"""Puts outputs together from the deltas of steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.chat_formats.messages import (
    MessageDelta,
    MessageExtent,
    ParsedMessage,
    ToolCallDelta,
)
from octavo.core.batch import TokenLogprobs
from octavo.serving.answer_reader import AnswerParser, AnswerReader, read_delta
from octavo.serving.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    PositionLogprobs,
    RequestOutput,
)
from octavo.serving.text_engine import SampleGroup, TextSample, metrics_of
from octavo.text.tokenizer import Tokenizer


class Extent(NamedTuple):
    """The length of one completion at some moment."""

    num_characters: int
    num_tokens: int
    num_logprobs: int
    cumulative_logprob: float
    finish_reason: str | None
    message: MessageExtent = MessageExtent()


@dataclass(slots=True)
class _Completion:
    """One sample so far. Its lists only grow, so that an extent is enough to return to an
    earlier state."""

    sample: TextSample
    num_characters: int = 0
    # In pieces. Reading the text joins those that are there, while further ones may be added.
    texts: list[str] = field(default_factory=list)
    joining: threading.Lock = field(default_factory=threading.Lock, repr=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    parser: AnswerParser | None = None  # of a chat
    message: ParsedMessage = field(default_factory=ParsedMessage)
    pieces: list[ToolCallDelta] = field(default_factory=list)  # of calls, since they were shown

    @property
    def extent(self) -> Extent:
        return Extent(
            self.num_characters,
            len(self.token_ids),
            len(self.logprobs),
            self.cumulative_logprob,
            self.finish_reason,
            self.message.extent,
        )

    def parse(self, delta: Delta) -> MessageDelta:
        """Take the text of a delta into the message; returns what is new in that."""
        if self.parser is None:
            return MessageDelta()
        new = read_delta(self.parser, delta)
        self.message.add(new)
        self.pieces += new.tool_calls
        return new

    @property
    def text(self) -> str:
        with self.joining:
            count = len(self.texts)
            if count > 1:
                self.texts[:count] = ["".join(self.texts[:count])]
            return self.texts[0] if count else ""

    def forget(self) -> None:
        """Drop all that has been shown."""
        self.num_characters = 0
        self.texts, self.token_ids, self.logprobs = [], [], []
        self.message.reasoning = self.message.content = None
        self.pieces = []


class OutputBuilder:
    """Builds the output of one prompt from its deltas, in any thread and at any pace.

    Taking a delta costs what is new in it; ``output`` costs the length of the whole output (its
    lists are copied), while ``take_output`` shows each part once.

    Args:
        reader: of the answers to a chat.
    """

    def __init__(
        self, group: SampleGroup, tokenizer: Tokenizer, reader: AnswerReader | None = None
    ):
        self.group = group
        self._tokenizer = tokenizer
        self._completions = [
            _Completion(sample, parser=None if reader is None else reader.parser())
            for sample in group.samples
        ]
        self._ended: set[int] = set()  # samples of which ``take_output`` has shown the end
        # Nothing comes before the first token.
        self._prompt_logprobs: list[PositionLogprobs | None] = [None]

    def take(self, delta: Delta) -> MessageDelta:
        """Add a delta, and return the parts of a message that it adds. Deltas are taken in their
        order, each once."""
        completion = self._completions[delta.index]
        if delta.text:
            completion.texts.append(delta.text)
            completion.num_characters += len(delta.text)
        completion.token_ids += delta.token_ids
        for entry in delta.logprobs:
            completion.cumulative_logprob += entry.logprob
            completion.logprobs.append(self._at_position(entry))
        for entry in delta.prompt_logprobs:
            self._prompt_logprobs.append(self._at_position(entry))
        completion.finish_reason = delta.finish_reason
        return completion.parse(delta)

    @property
    def is_finished(self) -> bool:
        """True if the last delta of each sample has been taken."""
        return all(completion.finish_reason is not None for completion in self._completions)

    def text(self, index: int) -> str:
        """Return the text of one sample, so far."""
        return self._completions[index].text

    def token_ids(self, index: int) -> list[int]:
        """Return the token ids of one sample, so far."""
        return self._completions[index].token_ids.copy()

    def message(self, index: int) -> MessageDelta:
        """Return the message of one sample, so far, as one delta."""
        message = self._completions[index].message
        return MessageDelta(
            message.reasoning or "",
            message.content or "",
            [
                ToolCallDelta(number, call.id, call.name, call.arguments)
                for number, call in enumerate(message.tool_calls)
            ],
        )

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Lengths of the samples so far."""
        return tuple(completion.extent for completion in self._completions)

    def output(self, extents: Sequence[Extent] | None = None) -> RequestOutput:
        """Return the output as it is, or as it was when the samples had these extents.

        Its metrics are those known by now.
        """
        group, params = self.group, self.group.params
        extents = self.extents if extents is None else extents
        is_finished = all(extent.finish_reason is not None for extent in extents)
        pairs = list(zip(self._completions, extents, strict=True))
        if params.num_samples > params.n and is_finished:
            pairs.sort(key=lambda pair: -pair[0].sample.cumulative_logprob)
            pairs = pairs[: params.n]
        outputs = [self._completion_output(rank, *pair) for rank, pair in enumerate(pairs)]
        errors = [one.sample.request.error for one, extent in pairs if extent.finish_reason]
        return RequestOutput(
            group.request_id,
            group.prompt,
            group.prompt_token_ids,
            outputs,
            is_finished,
            metrics_of(group),
            self._prompt_logprobs.copy() if params.prompt_logprobs is not None else None,
            next(filter(None, errors), None),
            group.lora_request,
        )

    def take_output(self) -> RequestOutput:
        """Return the part that is new since the last call, of the samples that have any.

        It costs what is new, however long the answer is, and nothing else is kept.
        """
        output = self.output()
        for one, completion in zip(output.outputs, self._completions, strict=True):
            one.tool_calls = completion.pieces
        new = [one for one in output.outputs if one.token_ids or one.text or one.finished()]
        output.outputs = [one for one in new if one.index not in self._ended]
        self._ended.update(one.index for one in output.outputs if one.finished())
        for completion in self._completions:
            completion.forget()
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = []
        return output

    def _completion_output(
        self, index: int, completion: _Completion, extent: Extent
    ) -> CompletionOutput:
        wants_logprobs = self.group.params.logprobs is not None
        is_finished = extent.finish_reason is not None
        message = completion.message.up_to(extent.message)
        return CompletionOutput(
            index=index,
            text=completion.text[: extent.num_characters],
            token_ids=completion.token_ids[: extent.num_tokens],
            finish_reason=extent.finish_reason,
            # The request's reason is final once its last delta is there.
            stop_reason=completion.sample.request.stop_reason if is_finished else None,
            cumulative_logprob=extent.cumulative_logprob if wants_logprobs else None,
            logprobs=completion.logprobs[: extent.num_logprobs] if wants_logprobs else None,
            reasoning=message.reasoning,
            content=message.content,
            tool_calls=message.tool_calls,
            lora_request=self.group.lora_request,
        )

    def _at_position(self, entry: TokenLogprobs) -> PositionLogprobs:
        position = {
            token_id: Logprob(logprob, rank, self._tokenizer.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        }
        own = Logprob(entry.logprob, entry.rank, self._tokenizer.token_text(entry.token_id))
        return {entry.token_id: own, **position} | {entry.token_id: own}
