"""``POST /v1/chat/completions``, OpenAI's route for conversations."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from octavo.base.errors import InvalidRequestError
from octavo.server.api.generation_job import GenerationJob
from octavo.server.api.openai.chat_body import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
)
from octavo.server.api.openai.chat_choices import ChatChoiceWriter
from octavo.server.api.openai.choices import answer
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
from octavo.server.http.background import briefly_in_background
from octavo.server.http.body import JsonRoute, work_on_body
from octavo.server.http.context import request_context
from octavo.serving.answer_reader import AnswerReader


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses=describe(ChatCompletion, ChatCompletionChunk),
    )
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation."""
        server.check_model(body.model)
        job, reader = await _begin(server, body, request)
        return await answer(server, request, body, job, ChatChoiceWriter(server, body, job, reader))

    return router


async def _begin(
    server: ServerContext, body: ChatCompletionRequest, request: Request
) -> tuple[GenerationJob, AnswerReader]:
    facts = server.engine.facts
    check_stream_fields(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("needs logprobs to be true", "top_logprobs")
    asked = body.max_completion_tokens or body.max_tokens
    room = context_of(facts) - (asked or 1)
    endless = may_exceed_context(body, asked, facts)
    messages, tools = await work_on_body(request, body.for_template)
    prompt = await server.prompts.chat(
        messages,
        tools=tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        documents=body.documents,
        reasoning_effort=body.reasoning_effort,
        thinking=body.enable_thinking,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=_adds_generation_prompt(body),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        limit=room if body.truncate_prompt_tokens is None and not endless else None,
        ignored=request_context(request).ignored,
    )
    token_ids = truncate(prompt.token_ids, body, room)
    params = to_sampling_params(
        body,
        facts,
        max_tokens=resolve_max_tokens(len(token_ids), asked, facts, body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    reader = prompt.reader
    try:
        if reader.asked.tools:  # of which a grammar is written
            reader, params = await briefly_in_background(reader.prepare, params)
        else:
            reader, params = reader.prepare(params)
    except InvalidRequestError as error:
        if error.field != "structured_outputs":
            raise
        raise error.with_field(body.constraint.field if body.constraint else "tools") from None
    job = await GenerationJob(server, request, body, [token_ids], params).begin()
    return job, reader


def _adds_generation_prompt(body: ChatCompletionRequest) -> bool:
    """True unless the last message is to be continued; the template refuses to do both."""
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt
