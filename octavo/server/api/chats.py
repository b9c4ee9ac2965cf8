"""Conversations that are to be continued, whatever API they came by: `Chat`, and its begin.

A dialect makes a `Chat` of its body and `GenerationFields` of the fields that say how to generate;
what comes back is read by `octavo.server.api.chat_answer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from starlette.requests import Request

from octavo.base.errors import InvalidRequestError, PromptTooLongError
from octavo.chat_formats.registry import format_of
from octavo.server.api.generation_job import GenerationJob
from octavo.server.api.requests import GenerationFields
from octavo.server.api.sampling import (
    context_of,
    may_exceed_context,
    resolve_max_tokens,
    to_sampling_params,
    truncate,
)
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import EngineFacts
from octavo.server.http.background import briefly_in_background
from octavo.server.http.context import IgnoredFields, request_context
from octavo.serving.answer_reader import AnswerReader, AskedTools
from octavo.serving.chat_templates import RenderedChat

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation in the form of OpenAI's API, and how the template makes a prompt of it.

    The fields are arguments of `PromptRenderer.chat`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    reasoning_effort: str | None = None
    thinking: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False

    async def render(
        self, server: ServerContext, ignored: IgnoredFields, limit: int | None = None
    ) -> RenderedChat:
        """Return the prompt; raises as `PromptRenderer.chat` does."""
        return await server.prompts.chat(**vars(self), limit=limit, ignored=ignored)

    def without_oldest(self, count: int) -> Chat:
        """Return the chat without its ``count`` oldest turns. A turn begins with a user's message;
        what stands before the first one, such as a system message, stays."""
        begins = self._turns
        dropped = slice(begins[0], begins[count])
        kept = [*self.messages[: dropped.start], *self.messages[dropped.stop :]]
        return replace(self, messages=kept)

    @property
    def num_turns(self) -> int:
        """Number of turns."""
        return len(self._turns)

    @property
    def _turns(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message.get("role") == "user"]


def is_to_be_continued(messages: Sequence[Message]) -> bool:
    """True if the last message is one of the assistant's that ends within its text."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(
        last.get("content") and not last.get("tool_calls")
    )


class FieldNames:
    """A dialect's names of fields, for errors and for the fields that have no effect.

    Args:
        names: OpenAI's names, or beginnings of dotted paths, with the dialect's. Where the
            dialect's places have other numbers (``messages.3`` need not be ``input.3``), the name
            ends with a dot, and the rest of a path is left out.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = names

    def own(self, field: str) -> str:
        """Return the dialect's name of a field."""
        for name, own in self._names.items():
            if field == name or field.startswith(f"{name}."):
                return own[:-1] if own.endswith(".") else own + field[len(name) :]
        return field

    def named(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return the error with the dialect's name of its field."""
        return error if error.field is None else error.with_field(self.own(error.field))


class _OwnIgnoredFields(IgnoredFields):
    """Notes fields without effect under a dialect's names."""

    def __init__(self, ignored: IgnoredFields, names: FieldNames):
        super().__init__(strict=ignored.strict)
        self._ignored, self._field_names = ignored, names

    def add(self, name: str) -> None:
        self._ignored.add(self._field_names.own(name))


OPENAI_NAMES = FieldNames({})


class Begun(NamedTuple):
    """A chat that is being answered: its job, and the reader of its answers."""

    job: GenerationJob
    reader: AnswerReader


@dataclass(frozen=True, kw_only=True)
class Length:
    """Limits of a chat and its answer.

    Args:
        max_tokens: of the answer; None is as many as the context allows.
        is_bound: more than there is room for is no error: the answer then ends with the context.
        drops_oldest: turns are dropped, the oldest first, where the prompt is too long.
        context: of prompt and answer together, if it is to be less than the server's.
    """

    max_tokens: int | None = None
    is_bound: bool = False
    drops_oldest: bool = False
    context: int | None = None

    def room(self, facts: EngineFacts) -> int:
        """Return how many tokens a prompt may have."""
        context = context_of(facts)
        if self.context is not None:
            context = min(context, self.context)
        return context - (1 if self.max_tokens is None or self.is_bound else self.max_tokens)

    def resolve(self, num_prompt_tokens: int, facts: EngineFacts, fields: GenerationFields) -> int:
        """Return the most tokens of the answer to a prompt; raises as `resolve_max_tokens` does."""
        asked = self.max_tokens
        if not self.is_bound or may_exceed_context(fields, asked, facts):
            return resolve_max_tokens(num_prompt_tokens, asked, facts, fields)
        most = resolve_max_tokens(num_prompt_tokens, None, facts, fields)
        if self.context is not None:
            most = max(min(most, self.context - num_prompt_tokens), 1)
        return most if asked is None else min(asked, most)


async def begin_chat(
    server: ServerContext,
    request: Request,
    fields: GenerationFields,
    chat: Chat,
    length: Length,
    *,
    names: FieldNames = OPENAI_NAMES,
    logprobs: int | None = None,
    before: Sequence[int] = (),
) -> Begun:
    """Queue a chat; raises as `PromptRenderer.chat`, `to_sampling_params` and
    `GenerationJob.begin` do, with the dialect's names of fields.

    Args:
        before: tokens that come before those of the chat.
    """
    ignored = _OwnIgnoredFields(request_context(request).ignored, names)
    try:
        return await _begin(server, request, fields, chat, length, ignored, logprobs, before)
    except InvalidRequestError as error:
        raise names.named(error) from None


async def count_tokens(
    server: ServerContext, request: Request, chat: Chat, *, names: FieldNames = OPENAI_NAMES
) -> int:
    """Return the number of tokens of a chat's prompt."""
    ignored = _OwnIgnoredFields(request_context(request).ignored, names)
    try:
        return len((await chat.render(server, ignored)).token_ids)
    except InvalidRequestError as error:
        raise names.named(error) from None


async def begin_text(
    server: ServerContext,
    request: Request,
    fields: GenerationFields,
    token_ids: list[int],
    length: Length,
    *,
    names: FieldNames = OPENAI_NAMES,
    logprobs: int | None = None,
) -> Begun:
    """Queue a prompt that no template has made: its answer is content alone. Raises as
    `begin_chat` does."""
    reader = AnswerReader(format_of("", {}), AskedTools())
    try:
        return await _submit(server, request, fields, token_ids, reader, length, logprobs)
    except InvalidRequestError as error:
        raise names.named(error) from None


async def _begin(
    server: ServerContext,
    request: Request,
    fields: GenerationFields,
    chat: Chat,
    length: Length,
    ignored: IgnoredFields,
    logprobs: int | None,
    before: Sequence[int],
) -> Begun:
    facts = server.engine.facts
    room = length.room(facts) - len(before)
    is_cut = fields.truncate_prompt_tokens is not None
    endless = may_exceed_context(fields, length.max_tokens, facts)
    limit = None if is_cut or endless else room
    if length.drops_oldest and limit is not None:
        prompt = await _fitting(server, chat, ignored, room)
    else:
        prompt = await chat.render(server, ignored, limit)
    token_ids = truncate(prompt.token_ids, fields, room)
    if before:
        begins = token_ids[:1] == [server.prompts.tokenizer.bos_token_id]
        token_ids = [*before, *token_ids[1 if begins else 0 :]]
    if chat.thinking and prompt.reader.thoughts is None:
        fields = fields.model_copy(update={"thinking_token_budget": None})
    return await _submit(server, request, fields, token_ids, prompt.reader, length, logprobs)


async def _submit(
    server: ServerContext,
    request: Request,
    fields: GenerationFields,
    token_ids: list[int],
    reader: AnswerReader,
    length: Length,
    logprobs: int | None,
) -> Begun:
    facts = server.engine.facts
    params = to_sampling_params(
        fields,
        facts,
        max_tokens=length.resolve(len(token_ids), facts, fields),
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )
    try:
        if reader.asked.tools:  # of which a grammar is written
            reader, params = await briefly_in_background(reader.prepare, params)
        else:
            reader, params = reader.prepare(params)
    except InvalidRequestError as error:
        if error.field != "structured_outputs":
            raise
        raise error.with_field(fields.constraint.field if fields.constraint else "tools") from None
    job = await GenerationJob(server, request, fields, [token_ids], params).begin()
    return Begun(job, reader)


async def _fitting(
    server: ServerContext, chat: Chat, ignored: IgnoredFields, room: int
) -> RenderedChat:
    """Return the prompt of as many of the newest turns as fit: found by halving, as each try takes
    a run of the template.

    Raises:
        PromptTooLongError: the last turn alone does not fit.
    """

    async def fits(count: int) -> RenderedChat | None:
        try:
            prompt = await chat.without_oldest(count).render(server, ignored, room)
        except PromptTooLongError:
            return None
        return prompt if len(prompt.token_ids) <= room else None

    if chat.num_turns < 2:
        return await chat.render(server, ignored, room)
    if (whole := await fits(0)) is not None:
        return whole
    least, most = 1, chat.num_turns - 1  # turns to drop
    while least < most:
        middle = (least + most) // 2
        if await fits(middle) is not None:
            most = middle
        else:
            least = middle + 1
    return await chat.without_oldest(least).render(server, ignored, room)
