"""The routes that clients of llama.cpp's server use beside OpenAI's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.base.errors import ChatTemplateError, InvalidRequestError
from octavo.core.batch import TokenLogprobs
from octavo.core.limits import DEFAULT_OUTPUT_TOKENS, checked_token_ids
from octavo.core.sampling_params import SamplingParams
from octavo.server.api.fill_in import fill_in_prompt
from octavo.server.api.generation_job import GenerationJob, sample_error
from octavo.server.api.llama_server.body import (
    InfillRequest,
    LlamaCompletion,
    LlamaCompletionRequest,
    Prompt,
    Props,
    Slots,
)
from octavo.server.api.llama_server.errors import llama_error_response
from octavo.server.api.openai.chat_body import ChatCompletionRequest
from octavo.server.api.openai.logprobs import TokenNames, finite
from octavo.server.api.requests import GenerationFields
from octavo.server.api.responses import describe
from octavo.server.api.sampling import (
    context_of,
    may_exceed_context,
    resolve_max_tokens,
    to_sampling_params,
)
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.body import DialectRoute, work_on_body
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError
from octavo.server.http.json_text import encode
from octavo.server.http.sse import EventStream, event, run_until_disconnect
from octavo.serving.outputs import Delta


class Template(BaseModel):
    prompt: str


class LlamaRoute(DialectRoute):
    """A route whose errors have llama.cpp's type for a prompt that is too long."""

    async def _answer_error(self, request: Request, error: HttpError) -> Response:
        return llama_error_response(error)


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=LlamaRoute, tags=["llama.cpp"])

    @router.post(
        "/completion",
        response_model=None,
        responses=describe(LlamaCompletion, LlamaCompletion),
    )
    async def complete(body: LlamaCompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        server.check_model(body.model)
        prompts = [
            await run_until_disconnect(request, _token_ids(server, prompt))
            for prompt in body.prompt
        ]
        return await _answer(server, body, request, prompts)

    @router.post(
        "/infill", response_model=None, responses=describe(LlamaCompletion, LlamaCompletion)
    )
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Fill in what belongs between two texts."""
        server.check_model(body.model)
        if body.prompt.is_list:
            raise InvalidRequestError("must be one text", "prompt")
        begin = await _token_ids(server, body.prompt[0], adds_bos=False)
        prompt = await fill_in_prompt(
            server.prompts,
            body.input_prefix,
            body.input_suffix,
            begin=begin,
            files=body.files,
            field="input_suffix",
        )
        return await _answer(server, body, request, [prompt])

    @router.get("/slots", response_model=None, responses=describe(Slots))
    async def slots(fail_on_no_slot: bool = False) -> Response:
        """List the places of requests that run at once, without anything of the requests."""
        facts, num_running = server.engine.facts, server.engine.stats.num_running
        if fail_on_no_slot and num_running >= facts.max_num_seqs:
            raise HttpError(503, "no slot is free", headers={"retry-after": "1"})
        found = [
            {"id": index, "n_ctx": context_of(facts), "is_processing": index < num_running}
            for index in range(facts.max_num_seqs)
        ]
        return JSONResponse(found)

    @router.get("/props", response_model=None, responses=describe(Props))
    async def props() -> Response:
        """Return facts about the served model, and the defaults of requests."""
        return JSONResponse(await _props(server))

    @router.post("/apply-template", response_model=None, responses=describe(Template))
    async def apply_template(body: ChatCompletionRequest, request: Request) -> Response:
        """Return the prompt that the chat template makes of a conversation."""
        chat = await work_on_body(request, body.to_chat)
        prompt = await chat.render(server, request_context(request).ignored)
        return Response(encode({"prompt": prompt.text}), media_type="application/json")

    return router


# -- /completion ---------------------------------------------------------------------------------


async def _answer(
    server: ServerContext,
    body: LlamaCompletionRequest,
    request: Request,
    prompts: list[list[int]],
) -> Response:
    """Return the answers to prompts, whole or as events."""
    job = await _begin(server, body, request, prompts)
    writer, headers = _CompletionWriter(server, body, job), job.cache_headers
    if body.stream:
        return EventStream(_events(job, writer), [job], server.settings, done=b"", headers=headers)
    groups = await job.collect(request)
    results = [await writer.whole(index, group[0]) for index, group in enumerate(groups)]
    answer = results if body.prompt.is_list else results[0]
    return Response(encode(answer), media_type="application/json", headers=headers)


async def _begin(
    server: ServerContext,
    body: LlamaCompletionRequest,
    request: Request,
    prompts: list[list[int]],
) -> GenerationJob:
    facts = server.engine.facts
    n_keep = min(map(len, prompts)) if body.n_keep == -1 else body.n_keep
    bias = await run_until_disconnect(request, _bias(server, body))
    fields = _generation_fields(body, bias, n_keep if facts.sink_windows.context_shift else None)
    # Where the context has too little room, the answer is cut ("truncated"), as llama.cpp does.
    if may_exceed_context(fields, body.max_tokens, facts):
        room = facts.max_output_tokens or DEFAULT_OUTPUT_TOKENS
    else:
        room = min(resolve_max_tokens(len(prompt), None, facts) for prompt in prompts)
    max_tokens = room if body.max_tokens is None else min(body.max_tokens, room)
    params = to_sampling_params(fields, facts, max_tokens=max_tokens, logprobs=body.n_probs or None)
    params = params.with_changes(cache_prompt=body.cache_prompt is not False)
    return await GenerationJob(server, request, fields, prompts, params).begin()


async def _token_ids(server: ServerContext, prompt: Prompt, *, adds_bos: bool = True) -> list[int]:
    """Return a prompt's tokens.

    Its texts may have special tokens in them: clients of this route write the chat template
    themselves.
    """
    facts = server.engine.facts
    token_ids: list[int] = []
    for index, piece in enumerate(prompt):
        if isinstance(piece, list):
            token_ids += checked_token_ids(piece, facts.vocab_size, "prompt")
        else:
            token_ids += await server.prompts.text(
                piece,
                add_special_tokens=adds_bos and index == 0,
                parse_special=True,
                limit=context_of(facts),
            )
    return token_ids


async def _bias(server: ServerContext, body: LlamaCompletionRequest) -> dict[str, float]:
    """Return the bias by token id, as text. A text's bias is that of each of its tokens."""
    pairs = body.logit_bias or []
    texts = [token for token, _ in pairs if isinstance(token, str)]
    tokens_of = dict(zip(texts, await server.prompts.pieces(texts), strict=True))
    bias: dict[str, float] = {}
    for token, amount in pairs:
        ids = [token] if isinstance(token, int) else tokens_of[token]
        bias |= dict.fromkeys(map(str, ids), amount)
    return bias


def _generation_fields(
    body: LlamaCompletionRequest, bias: dict[str, float], n_keep: int | None
) -> GenerationFields:
    """Return the fields of a body under the names of the other routes."""
    return GenerationFields.of(
        body,
        temperature=None if body.temperature is None else max(body.temperature, 0.0),
        top_k=None if body.top_k is None else max(body.top_k, 0),
        repetition_penalty=body.repeat_penalty,
        logit_bias=bias or None,
        n_keep=n_keep,
    )


@dataclass(slots=True)
class _Progress:
    """The part of one answer that was written so far."""

    tokens: list[int] = field(default_factory=list)
    has_new_line: bool = False


class _CompletionWriter:
    """Writes the JSON objects of one job's answers."""

    def __init__(self, server: ServerContext, body: LlamaCompletionRequest, job: GenerationJob):
        self._server, self._body, self._job = server, body, job
        self._names = TokenNames(server.prompts.tokenizer)
        self._progress = [_Progress() for _ in job.generations]

    async def whole(self, index: int, completion: Delta) -> dict[str, Any]:
        if completion.finish_reason == "error":
            raise sample_error(completion.error)
        is_empty = self._body.n_predict == 0  # the engine always generates
        text, tokens = ("", []) if is_empty else (completion.text, completion.token_ids)
        end = Delta(index, text, tokens, [], completion.finish_reason, completion.stop_reason)
        result = await self.last(index, end)
        result["content"] = text
        result["tokens"] = tokens if self._body.return_tokens else []
        if self._body.n_probs:
            found = await in_background(self._probabilities, completion.logprobs)
            result["completion_probabilities"] = found
        if self._body.response_fields:
            return _select(result, self._body.response_fields)
        return result

    def next(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return an event of a stream, not the last one."""
        progress = self._progress[index]
        progress.tokens += delta.token_ids
        progress.has_new_line |= "\n" in delta.text
        result = {
            "index": index,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "tokens_predicted": len(progress.tokens),
            "tokens_evaluated": self._job.generations[index].stats.num_prompt_tokens,
        }
        if self._body.timings_per_token:
            result["timings"] = self._job.timings()
        if self._body.n_probs:
            result["completion_probabilities"] = self._probabilities(delta.logprobs)
        return result

    async def last(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the last event of a stream, or the fields of a whole answer."""
        generation, progress = self._job.generations[index], self._progress[index]
        num_tokens = len(progress.tokens) or len(delta.token_ids)
        prompt = await self._server.prompts.detokenize(generation.request.prompt_token_ids)
        stop_type = _stop_type(delta)
        asked = self._body.max_tokens
        return {
            "index": index,
            "content": "",
            "tokens": [],
            "stop": True,
            "model": self._body.model or self._server.model_names[0],
            "tokens_predicted": num_tokens,
            "tokens_evaluated": generation.stats.num_prompt_tokens,
            "generation_settings": self._settings(generation.request.params),
            "prompt": prompt,
            "has_new_line": progress.has_new_line or "\n" in delta.text,
            "truncated": stop_type == "limit" and (asked is None or num_tokens < asked),
            "stop_type": stop_type,
            "stopping_word": delta.stop_reason if isinstance(delta.stop_reason, str) else "",
            "tokens_cached": generation.stats.num_cached_tokens,
            "timings": self._job.timings(),
        }

    def _settings(self, params: SamplingParams) -> dict[str, Any]:
        return {
            **generation_settings(params),
            "seed": params.seed,
            "n_predict": -1 if self._body.n_predict is None else self._body.n_predict,
            "n_probs": self._body.n_probs or 0,
            "stream": bool(self._body.stream),
            "cache_prompt": params.cache_prompt,
        }

    def _probabilities(self, entries: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*top) for top in entry.top],
            }
            for entry in entries
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "token": self._server.prompts.tokenizer.token_text(token_id),
            "bytes": list(self._names.bytes(token_id)),
            "logprob": finite(logprob),
        }


async def _events(job: GenerationJob, writer: _CompletionWriter) -> AsyncGenerator[bytes, None]:
    async for index, deltas in job.updates():
        for delta in deltas:
            if delta.finish_reason == "error":
                raise sample_error(delta.error)
            if delta.text or delta.token_ids:
                yield event(writer.next(index, delta))
            if delta.finish_reason is not None:
                yield event(await writer.last(index, delta))


def _stop_type(delta: Delta) -> str:
    if delta.finish_reason == "stop":
        return "eos" if delta.stop_reason is None else "word"
    return "limit" if delta.finish_reason == "length" else "none"


def _select(result: dict[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return the members at paths such as ``generation_settings/seed``, as far as they exist."""
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = result
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            selected[path] = value
    return selected


def generation_settings(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters under llama.cpp's names."""
    bias = params.logit_bias or {}
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "top_n_sigma": params.top_n_sigma or -1,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": token, "bias": amount} for token, amount in bias.items()],
        "max_tokens": params.max_tokens,
    }


# -- /props --------------------------------------------------------------------------------------


async def _props(server: ServerContext) -> dict[str, Any]:
    facts, tokenizer = server.engine.facts, server.prompts.tokenizer
    defaults = to_sampling_params(GenerationFields.model_construct(), facts, max_tokens=1)
    params = {**generation_settings(defaults), "seed": -1, "n_predict": -1, "max_tokens": -1}
    try:
        template = await server.prompts.template_source()
    except ChatTemplateError:  # it has none
        template = ""
    return {
        "default_generation_settings": {"params": params, "n_ctx": context_of(facts)},
        "total_slots": facts.max_num_seqs,
        "model_alias": server.model_names[0],
        "model_path": server.model_names[0],  # clients must not learn the real path
        "chat_template": template,
        "bos_token": _token_text(server, tokenizer.bos_token_id),
        "eos_token": _token_text(server, next(iter(facts.eos_token_ids), None)),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"octavo-{__version__}",
        "is_sleeping": False,
    }


def _token_text(server: ServerContext, token_id: int | None) -> str:
    return "" if token_id is None else server.prompts.tokenizer.token_text(token_id)
