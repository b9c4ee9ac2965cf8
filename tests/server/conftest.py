"""An engine that answers at once, for tests of what stands before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.types import ASGIApp

from octavo.base.errors import OctavoError
from octavo.core.batch import TokenLogprobs
from octavo.core.limits import QueueLimits, RequestWork
from octavo.core.stats import StepStats
from octavo.server.api.prompts import PromptRenderer
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import (
    EngineFacts,
    EngineState,
    Generation,
    GenerationRequest,
)
from octavo.server.engine.response_cache import ResponseCache
from octavo.server.http.access_control import DrainState
from octavo.server.http.context import RequestContext
from octavo.server.http.errors import HttpError, error_response, to_http_error
from octavo.server.http.tenants import Tenant
from octavo.server.settings import ServerSettings
from octavo.serving.outputs import Delta


@pytest.fixture(scope="session")
def fake_engine_type() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def fake_engine(byte_tokenizer) -> FakeEngine:
    return FakeEngine(byte_tokenizer)


@pytest.fixture
def create_service(byte_tokenizer) -> Callable[..., ServerContext]:
    """Makes the service of one engine; other keyword arguments are the server's settings."""

    def create(
        engine,
        *,
        model_argument: str | None = None,
        cache: ResponseCache | None = None,
        **settings,
    ) -> ServerContext:
        chosen = ServerSettings(**settings)
        trust = chosen.trust_request_chat_template
        return ServerContext(
            settings=chosen,
            engine=engine,
            prompts=PromptRenderer(byte_tokenizer, trust_request_chat_template=trust),
            metrics=None,
            drain_state=DrainState(),
            model_names=("tiny", "also-tiny"),
            created=1_700_000_000,
            model_argument=model_argument,
            response_cache=cache,
        )

    return create


@pytest.fixture
def create_test_app() -> Callable[..., ASGIApp]:
    """Makes an app of routers, with the context of `AccessControl` in every request."""

    def create(*routers, tenant: Tenant | None = None) -> ASGIApp:
        app = FastAPI()
        for router in routers:
            app.include_router(router)
        for kind in (HttpError, OctavoError, RequestValidationError):
            app.add_exception_handler(kind, lambda _, error: error_response(to_http_error(error)))

        async def with_context(scope, receive, send):
            if scope["type"] == "http":
                someone = tenant or Tenant("test")
                scope["octavo"] = RequestContext("req-1", someone, time.monotonic())
            await app(scope, receive, send)

        with_context.openapi = app.openapi
        return with_context

    return create


@pytest.fixture
def send(create_test_app) -> Callable[..., httpx.Response]:
    """Sends one request to the routes of a router, and returns the answer when it is whole."""

    def send(router, method, path, *, tenant=None, **kwargs) -> httpx.Response:
        app = create_test_app(router, tenant=tenant)

        async def exchange() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(exchange())

    return send


class FakeEngine:
    """Answers with ``answer(request, index)``: token ids, cut to ``max_tokens``; by default the
    prompt, backwards, over and over.

    One token a turn of the event loop, ``delay`` seconds apart. ``submit_error`` is raised by the
    next submit; ``error_after`` ends each generation with ``error`` after so many tokens.
    """

    def __init__(self, tokenizer, *, max_model_len: int = 256, delay: float = 0.0):
        self.tokenizer = tokenizer
        self.delay = delay
        self.state = EngineState.READY
        self.facts = EngineFacts(max_model_len, 64, tokenizer.vocab_size, 1024, 16, (256,))
        self.stats, self.num_restarts = StepStats.idle(), 0
        self.requests: list[GenerationRequest] = []
        self.generations: list[Generation] = []
        self.aborted: list[str] = []
        self.room_error: Exception | None = None
        self.limits = QueueLimits()
        self.submit_error: Exception | None = None
        self.error_after: int | None = None
        self.miss_reason = ""
        self.error: Exception = RuntimeError("asked for")
        self.answer: Callable[[GenerationRequest, int], list[int]] = _backwards
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_enabled = False

    def enable_snapshots(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled

    def check_capacity(self, tenant: str = "") -> None:
        if self.room_error is not None:
            raise self.room_error

    def check_size(self, num_requests: int, num_tokens: int) -> None:
        self.limits.check(RequestWork(num_requests, num_tokens))

    def submit(self, request: GenerationRequest) -> Generation:
        if self.submit_error is not None:
            raise self.submit_error
        self.requests.append(request)
        generation = Generation(request, lambda one: self.aborted.append(one.request.request_id))
        self.generations.append(generation)
        task = asyncio.get_running_loop().create_task(self._run(generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def _run(self, generation: Generation) -> None:
        request, params = generation.request, generation.request.params
        started = time.monotonic()
        most = params.max_tokens or self.facts.max_model_len - len(request.prompt_token_ids)
        answers = [self.answer(request, index)[:most] for index in range(params.num_samples)]
        if params.prompt_logprobs is not None:
            generation.prompt_logprobs = [
                _logprob(token, params.prompt_logprobs) for token in request.prompt_token_ids[1:]
            ]
        for step in range(max(map(len, answers))):
            await asyncio.sleep(self.delay)
            if generation.is_over:
                return
            if self.error_after == step:
                generation.fail(self.error)
                return
            deltas = []
            for index, ids in enumerate(answers):
                if step >= len(ids):
                    continue
                is_last = step + 1 == len(ids)
                reason = None
                if is_last:
                    reason = "length" if len(ids) == most else "stop"
                text = self.tokenizer.decode([ids[step]])
                logprobs = [] if params.logprobs is None else [_logprob(ids[step], params.logprobs)]
                cumulative = -0.5 * len(ids) - index if is_last else None
                deltas.append(Delta(index, text, [ids[step]], logprobs, reason, None, cumulative))
            stats = generation.stats
            stats.miss_reason = self.miss_reason
            stats.e2e = time.monotonic() - started
            if step == 0:
                stats.queue_time, stats.ttft, stats.prefill_time = 0.0, stats.e2e, stats.e2e
            stats.decode_time = stats.e2e - (stats.ttft or 0.0)
            stats.tpot = stats.decode_time / step if step else None
            generation.push(deltas)


def _backwards(request: GenerationRequest, index: int) -> list[int]:
    return request.prompt_token_ids[::-1] * 256


def _logprob(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple((token_id + rank, -0.5 - rank) for rank in range(num_top))
    return TokenLogprobs(token_id, -0.5, 1, top)
