"""``POST /v1/completions``, OpenAI's route for texts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.base.errors import InvalidRequestError
from octavo.core.batch import TokenLogprobs
from octavo.core.limits import checked_token_ids
from octavo.server.api.generation_job import GenerationJob
from octavo.server.api.openai import completion_body as protocol
from octavo.server.api.openai.choices import ChoiceWriter, answer
from octavo.server.api.openai.completion_body import CompletionRequest, Prompt
from octavo.server.api.openai.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.server.api.responses import describe
from octavo.server.api.sampling import (
    check_stream_fields,
    context_of,
    may_exceed_context,
    resolve_max_tokens,
    to_sampling_params,
    truncate,
)
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import EngineFacts, Generation
from octavo.server.http.body import JsonRoute
from octavo.serving.outputs import Delta

DEFAULT_MAX_TOKENS = 16


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @router.post(
        "/v1/completions",
        response_model=None,
        responses=describe(protocol.Completion, protocol.CompletionChunk),
    )
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one text or several."""
        server.check_model(body.model)
        prompts = await _prompts(server, body)
        echoed = await _echoed_texts(server, body, prompts)
        job = await _begin(server, body, request, prompts)
        writer = _CompletionChoiceWriter(server, body, job, echoed)
        return await answer(server, request, body, job, writer)

    return router


async def _prompts(server: ServerContext, body: CompletionRequest) -> list[list[int]]:
    _check_combinations(body)
    facts = server.engine.facts
    asked = _asked_tokens(body, facts)
    return [await _to_token_ids(server, body, prompt, facts, asked) for prompt in body.prompt]


def _asked_tokens(body: CompletionRequest, facts: EngineFacts) -> int:
    """Return the number of tokens to generate.

    The engine always generates: scoring a prompt (``max_tokens`` 0) costs a token that is not
    shown.
    """
    if body.max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, facts.max_output_tokens or DEFAULT_MAX_TOKENS)
    return max(body.max_tokens, 1)


async def _echoed_texts(
    server: ServerContext, body: CompletionRequest, prompts: list[list[int]]
) -> list[str]:
    """Return the text before each answer: its prompt, if ``echo`` asks for it."""
    if not body.echo:
        return [""] * len(prompts)
    skip = body.skip_special_tokens is not False
    texts = []
    for given, token_ids in zip(body.prompt, prompts, strict=True):
        if isinstance(given, str) and body.truncate_prompt_tokens is None:
            texts.append(given)
        else:
            texts.append(await server.prompts.detokenize(token_ids, skip_special_tokens=skip))
    return texts


async def _begin(
    server: ServerContext, body: CompletionRequest, request: Request, prompts: list[list[int]]
) -> GenerationJob:
    facts = server.engine.facts
    asked = _asked_tokens(body, facts)
    if body.max_tokens == -1:
        asked = min(resolve_max_tokens(len(prompt), None, facts) for prompt in prompts)
    params = to_sampling_params(
        body,
        facts,
        max_tokens=asked,
        logprobs=body.logprobs,
        prompt_logprobs=_num_prompt_logprobs(body),
    )
    return await GenerationJob(server, request, body, prompts, params).begin()


def _check_combinations(body: CompletionRequest) -> None:
    check_stream_fields(body)
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise InvalidRequestError(
            "cannot be streamed: all must end before the best is known", "best_of"
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("must be at least 1, unless echo is true", "max_tokens")


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many log-probabilities the prompt's tokens need.

    With ``echo``, the prompt is part of the text, and ``logprobs`` are of all the text.
    """
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in counts if count is not None), default=None)


async def _to_token_ids(
    server: ServerContext,
    body: CompletionRequest,
    prompt: Prompt,
    facts: EngineFacts,
    max_tokens: int,
) -> list[int]:
    room = context_of(facts) - max_tokens
    endless = may_exceed_context(body, max_tokens, facts)
    if isinstance(prompt, str):
        token_ids = await server.prompts.text(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            limit=room if body.truncate_prompt_tokens is None and not endless else None,
        )
    else:
        token_ids = checked_token_ids(prompt, facts.vocab_size, "prompt")
    token_ids = truncate(token_ids, body, room)
    resolve_max_tokens(len(token_ids), max_tokens, facts, body)
    return token_ids


class _CompletionChoiceWriter(ChoiceWriter):
    object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, server: ServerContext, body: CompletionRequest, job: GenerationJob, echoed: list[str]
    ):
        super().__init__(server, body, job)
        self._body, self._echoed = body, echoed
        self._tokenizer = server.prompts.tokenizer
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self.counts_output = body.max_tokens != 0

    def first(self, index: int) -> dict[str, Any] | None:
        logprobs = self._next_logprobs(index, [], [])  # which reads the prompt, if any do
        if not (self._body.echo or self._body.return_token_ids):
            return None
        choice = {
            "index": index,
            "text": self._prompt_text(index),
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompt(index)
            choice["token_ids"] = []
        return choice

    def next(self, index: int, delta: Delta) -> dict[str, Any] | None:
        if not self.counts_output:
            reason = None if delta.finish_reason is None else "length"
            delta = Delta(delta.index, finish_reason=reason)
        return super().next(index, delta)

    def whole(self, index: int, completion: Delta) -> dict[str, Any]:
        if not self.counts_output:
            completion = Delta(completion.index, finish_reason="length")
        choice = super().whole(index, completion)
        if self._body.prompt_logprobs is not None:
            entries = self._generation(index).prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(entries, self._names)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompt(index)
        return choice

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = self._next_logprobs(index, delta.token_ids, delta.logprobs)
        return {"text": delta.text, "logprobs": logprobs}

    def message(self, index: int, completion: Delta) -> dict[str, Any]:
        members = self.piece(index, completion)
        return {**members, "text": self._prompt_text(index) + completion.text}

    def _generation(self, index: int) -> Generation:
        return self._job.generations[index // self._job.params.n]

    def _prompt(self, index: int) -> list[int]:
        return self._generation(index).request.prompt_token_ids

    def _prompt_text(self, index: int) -> str:
        return self._echoed[index // self._job.params.n]

    def _next_logprobs(self, index: int, token_ids: list[int], entries: list[TokenLogprobs]) -> Any:
        """Return the ``logprobs`` of these tokens.

        The first call of a choice with ``echo`` adds those of the prompt before them.
        """
        if self._body.logprobs is None:
            return None
        writer = self._logprobs.get(index)
        if writer is not None:
            return writer.next(token_ids, entries)
        prompt = self._prompt(index)
        echo = bool(self._body.echo)
        writer = self._logprobs[index] = CompletionLogprobs(
            self._tokenizer,
            self._names,
            before=() if echo else prompt,
            skip_special_tokens=self._body.skip_special_tokens is not False,
        )
        if not echo:
            return writer.next(token_ids, entries)
        known = self._generation(index).prompt_logprobs
        return writer.next([*prompt, *token_ids], [None, *known, *entries])
