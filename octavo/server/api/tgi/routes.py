"""The API of Hugging Face's TGI, as ``huggingface_hub.InferenceClient`` speaks it.

Where octavo differs from TGI, on purpose:

- A field that the engine does not support is an error that names it. TGI ignores some.
- Errors have octavo's statuses (400 where TGI says 422), and a body that both TGI's clients and
  programs that know OpenAI's errors can read: ``error`` and ``error_type`` are TGI's, ``type``,
  ``param`` and ``code`` are OpenAI's, without the object around them.
- The texts of a stream's tokens make up ``generated_text`` exactly: special tokens have none, and
  half a character comes with its other half.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.base.errors import InvalidRequestError
from octavo.core.batch import TokenLogprobs
from octavo.core.sampling_params import MAX_N, MAX_STOP_STRINGS, SamplingParams
from octavo.server.api.answers import Error
from octavo.server.api.generation_job import GenerationJob, check_sample
from octavo.server.api.openai.logprobs import finite
from octavo.server.api.requests import GenerationFields
from octavo.server.api.responses import describe
from octavo.server.api.sampling import context_of, resolve_max_tokens
from octavo.server.api.server_context import ServerContext
from octavo.server.api.tgi.protocol import (
    TgiError,
    TgiInfo,
    TgiParameters,
    TgiRequest,
    TgiResponse,
    TgiStreamEvent,
    TgiStreamRequest,
)
from octavo.server.http.body import DialectRoute
from octavo.server.http.errors import HttpError, error_body, to_http_error
from octavo.server.http.sse import EventStream, event, run_until_disconnect
from octavo.server.settings import MAX_STOP_CHARS
from octavo.serving.outputs import Delta
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 100
# TGI's types of errors by status; others are one of the last two.
_ERROR_TYPES = {429: "overloaded", 503: "overloaded", 504: "timeout"}
_CLIENT_ERROR, _SERVER_ERROR = "validation", "generation"


class TgiRoute(DialectRoute):
    """A route whose errors have TGI's body."""

    async def _answer_error(self, request: Request, error: HttpError) -> Response:
        return tgi_error_response(error)


def create_router(server: ServerContext) -> APIRouter:
    """Return TGI's routes, but for ``/generate``, which `api/octavo/generate.py` shares with it."""
    router = APIRouter(route_class=TgiRoute, tags=["TGI"])
    stream_only = _describe(TgiResponse, TgiStreamEvent)
    del stream_only[200]["model"]

    @router.post(
        "/generate_stream",
        response_model=None,
        response_class=Response,
        responses=stream_only,
    )
    async def generate_stream(body: TgiStreamRequest, request: Request) -> Response:
        """Stream an answer."""
        return await stream_tgi(server, body, request)

    @router.post("/", response_model=None, responses=_describe(list[TgiResponse], TgiStreamEvent))
    async def generate_either(body: TgiRequest, request: Request) -> Response:
        """Stream an answer or not; Hugging Face's client uses this route."""
        if body.stream:
            return await stream_tgi(server, body, request)
        return await generate_tgi(server, body, request, in_list=True)

    @router.get("/info")
    async def info() -> TgiInfo:
        """Return facts about the served model, and the limits of requests."""
        facts = server.engine.facts
        return TgiInfo(
            model_id=server.model_names[0],
            model_sha=None,
            model_pipeline_tag="text-generation",
            model_dtype=facts.info.get("dtype"),
            model_device_type=facts.info.get("device"),
            max_concurrent_requests=facts.max_num_seqs,
            max_best_of=MAX_N,
            max_stop_sequences=MAX_STOP_STRINGS,
            max_input_tokens=facts.max_model_len - 1,
            max_total_tokens=facts.max_model_len,
            max_client_batch_size=1,
            router="octavo",
            version=__version__,
            sha=None,
            docker_label=None,
        )

    return router


def _describe(model: Any, chunk: type[BaseModel]) -> dict[int | str, Any]:
    responses = describe(model, chunk)
    for status, response in responses.items():
        if status != 200:
            response["model"] = TgiError | Error  # `AccessControl` answers with the latter
    return responses


# -- the two ways to answer ---------------------------------------------------------------------


async def generate_tgi(
    server: ServerContext, body: TgiRequest, request: Request, *, in_list: bool = False
) -> Response:
    """Return the whole answer as one object."""
    parameters = body.parameters or TgiParameters()
    job = await _begin(server, body, request, parameters, streams=False)
    (completions,) = await job.collect(request)
    for completion in completions:
        check_sample(completion)
    completions.sort(key=_mean_logprob, reverse=True)
    tokenizer = server.prompts.tokenizer

    def answer_as_json(to_json: Callable[[Any], str]) -> str:
        answer = _full_answer(body, job, completions, tokenizer)
        return to_json([answer] if in_list else answer)

    text = await job.write([completions], True, answer_as_json)
    return Response(text, media_type="application/json", headers=job.cache_headers)


def _full_answer(
    body: TgiRequest,
    job: GenerationJob,
    completions: list[Delta],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    parameters = body.parameters or TgiParameters()
    (generation,) = job.generations
    before = body.inputs if parameters.return_full_text else ""
    answer: dict[str, Any] = {"generated_text": before + completions[0].text}
    if parameters.wants_details:
        prompt = generation.request.prompt_token_ids if parameters.decoder_input_details else []
        prefill = _prefill(prompt, generation.prompt_logprobs, tokenizer)
        seed = _seed(job)
        sequences = [
            _details(completion, prefill, seed, parameters.top_n_tokens, tokenizer)
            for completion in completions
        ]
        answer["details"] = sequences[0]
        if len(completions) > 1:
            sequences[0]["best_of_sequences"] = [
                {"generated_text": before + completion.text, **sequence}
                for completion, sequence in zip(completions[1:], sequences[1:], strict=True)
            ]
    return answer


async def stream_tgi(server: ServerContext, body: TgiRequest, request: Request) -> EventStream:
    """Return the answer token by token. Unlike OpenAI's streams, TGI's have no event for the
    end."""
    parameters = body.parameters or TgiParameters()
    for name, value in (
        ("best_of", (parameters.best_of or 1) > 1),
        ("decoder_input_details", parameters.decoder_input_details),
    ):
        if value:
            raise _refuse(name, "cannot be had with streaming")
    job = await _begin(server, body, request, parameters, streams=True)
    return EventStream(
        _stream_events(job, body, parameters, server.prompts.tokenizer),
        [job],
        server.settings,
        done=b"",
        headers=job.cache_headers,
        error_event=lambda error: event(tgi_error_body(to_http_error(error))),
        error_response=tgi_error_response,
    )


async def _begin(
    server: ServerContext,
    body: TgiRequest,
    request: Request,
    parameters: TgiParameters,
    *,
    streams: bool,
) -> GenerationJob:
    facts = server.engine.facts
    # What `truncate` cuts off may be longer than the context.
    limit = None if parameters.truncate else context_of(facts)
    prompt = await run_until_disconnect(request, server.prompts.text(body.inputs, limit=limit))
    if parameters.truncate:
        prompt = prompt[-parameters.truncate :]
    max_tokens = resolve_max_tokens(
        len(prompt), parameters.max_new_tokens, facts, field="parameters.max_new_tokens"
    )
    if parameters.max_new_tokens is None:
        max_tokens = min(max_tokens, DEFAULT_NEW_TOKENS)
    params = to_sampling_params(parameters, max_tokens=max_tokens, with_logprobs=streams)
    fields = GenerationFields.of(parameters, stream=streams)
    return await GenerationJob(server, request, fields, [prompt], params).begin()


def to_sampling_params(
    parameters: TgiParameters, *, max_tokens: int, with_logprobs: bool
) -> SamplingParams:
    """Convert TGI's parameters, always with a seed, so that the request can be run again.

    Raises:
        InvalidRequestError: the engine cannot do what one of them asks for.
    """
    if sum(map(len, parameters.stop or ())) > MAX_STOP_CHARS:
        raise _refuse("stop", f"at most {MAX_STOP_CHARS} characters in all")
    best_of = parameters.best_of or 1
    if best_of > 1 and not parameters.is_sampling:
        raise _refuse("best_of", "above 1 needs sampling: all answers would be the same")
    temperature = 1.0 if parameters.temperature is None else parameters.temperature
    wants_logprobs = with_logprobs or parameters.wants_details or best_of > 1
    return SamplingParams(
        n=best_of,
        temperature=temperature if parameters.is_sampling else 0.0,
        top_k=parameters.top_k or 0,
        top_p=parameters.top_p or 1.0,
        typical_p=parameters.typical_p or 1.0,
        seed=secrets.randbits(63) if parameters.seed is None else parameters.seed,
        repetition_penalty=parameters.repetition_penalty or 1.0,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        stop=tuple(parameters.stop or ()),
        include_stop_str_in_output=True,
        max_tokens=max_tokens,
        logprobs=(parameters.top_n_tokens or 0) if wants_logprobs else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        structured_outputs=None if parameters.constraint is None else parameters.constraint.value,
    )


# -- contents of answers ------------------------------------------------------------------------


async def _stream_events(
    job: GenerationJob, body: TgiRequest, parameters: TgiParameters, tokenizer: Tokenizer
) -> AsyncGenerator[bytes, None]:
    """Yield an event for each token; the text that a step brought comes with its last token."""
    (generation,) = job.generations
    parts = [body.inputs] if parameters.return_full_text else []
    index = 0
    async for deltas in generation:
        for delta in deltas:
            check_sample(delta)
            parts.append(delta.text)
            last = len(delta.logprobs) - 1
            for place, entry in enumerate(delta.logprobs):
                index += 1
                text = delta.text if place == last else ""
                answer: dict[str, Any] = {"index": index, "token": _token(entry, text, tokenizer)}
                if parameters.top_n_tokens:
                    answer["top_tokens"] = _top_tokens(entry, tokenizer)
                answer |= {"generated_text": None, "details": None}
                if place == last and delta.finish_reason is not None:
                    answer["generated_text"] = "".join(parts)
                    if parameters.wants_details:
                        answer["details"] = {
                            "finish_reason": _finish_reason(delta),
                            "generated_tokens": index,
                            "input_length": generation.stats.num_prompt_tokens,
                            "seed": _seed(job),
                        }
                yield event(answer)


def _details(
    completion: Delta,
    prefill: list[dict[str, Any]],
    seed: int | None,
    num_top: int | None,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    tokens = [
        _token(entry, text, tokenizer)
        for entry, text in zip(
            completion.logprobs, _token_texts(completion.token_ids, tokenizer), strict=True
        )
    ]
    details: dict[str, Any] = {
        "finish_reason": _finish_reason(completion),
        "generated_tokens": len(completion.token_ids),
        "seed": seed,
        "prefill": prefill,
        "tokens": tokens,
    }
    if num_top:
        details["top_tokens"] = [_top_tokens(entry, tokenizer) for entry in completion.logprobs]
    return details


def _token_texts(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text that each token adds."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts = [detokenizer.push([token_id]) for token_id in token_ids]
    if texts:
        texts[-1] += detokenizer.finish()
    return texts


def _prefill(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    known = [None, *(finite(entry.logprob) for entry in logprobs)]
    return [
        {"id": token_id, "text": tokenizer.token_text(token_id), "logprob": logprob}
        for token_id, logprob in zip(token_ids, known, strict=False)
    ]


def _token(entry: TokenLogprobs, text: str, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "id": entry.token_id,
        "text": text,
        "logprob": finite(entry.logprob),
        "special": tokenizer.is_special(entry.token_id),
    }


def _top_tokens(entry: TokenLogprobs, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [
        {
            "id": token_id,
            "text": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "special": tokenizer.is_special(token_id),
        }
        for token_id, logprob in entry.top
    ]


def _finish_reason(end: Delta) -> str:
    if end.finish_reason == "length":
        return "length"
    return "stop_sequence" if isinstance(end.stop_reason, str) else "eos_token"


def _seed(job: GenerationJob) -> int | None:
    return job.params.seed if job.params.temperature else None


def _mean_logprob(completion: Delta) -> float:
    """Return the mean log-probability of a completion's tokens.

    TGI chooses the best of several by it, so that short answers have no advantage.
    """
    logprobs = [entry.logprob for entry in completion.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


# -- errors -------------------------------------------------------------------------------------


def _refuse(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(reason, f"parameters.{name}")


def tgi_error_body(error: HttpError) -> dict[str, Any]:
    """Return an error body for TGI's clients, and for programs that know OpenAI's errors."""
    fallback = _SERVER_ERROR if error.status >= 500 else _CLIENT_ERROR
    fields = error_body(error)["error"]
    message = fields.pop("message")
    return {"error": message, "error_type": _ERROR_TYPES.get(error.status, fallback), **fields}


def tgi_error_response(error: HttpError) -> JSONResponse:
    return JSONResponse(tgi_error_body(error), error.status, error.headers)
