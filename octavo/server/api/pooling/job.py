"""The work of one HTTP request whose answer is made of pooled texts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from starlette.requests import Request

from octavo.core.limits import RequestWork
from octavo.core.pooling_params import PoolingInput, PoolingParams
from octavo.core.sampling_params import SamplingParams
from octavo.server.api.generation_job import GenerationJob, deadline_of, sample_error
from octavo.server.api.pooling.body import PoolingFields
from octavo.server.api.prompts import SMALL_TEXT
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import GenerationRequest
from octavo.server.http.background import briefly_in_background, in_background
from octavo.server.http.context import request_context
from octavo.server.http.sse import run_until_disconnect
from octavo.serving.pooling_model import Pooled, PoolingModel
from octavo.serving.pooling_texts import PoolingPrompt

if TYPE_CHECKING:
    import numpy as np

P = ParamSpec("P")
T = TypeVar("T")

# Texts of one request that are in the engine's queue at once: others come in between.
_TEXTS_AT_ONCE = 256
_NOT_SAMPLED = SamplingParams(max_tokens=1, detokenize=False)


class PoolingJob(GenerationJob):
    """Pools the texts of one HTTP request. It must be closed, whatever happens."""

    def __init__(
        self,
        server: ServerContext,
        request: Request,
        fields: PoolingFields,
        prompts: Sequence[PoolingPrompt],
        params: PoolingParams,
    ):
        context = request_context(request)
        self.params = _NOT_SAMPLED
        self._server, self._tenant = server, context.tenant
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._work = RequestWork(len(prompts), num_tokens)
        # Those that are not in the queue yet do not count there.
        server.engine.check_size(min(len(prompts), _TEXTS_AT_ONCE), num_tokens)
        deadline = deadline_of(
            fields.timeout, server.settings.request_timeout, context.arrival_time
        )
        self._requests = [
            GenerationRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=prompt.token_ids,
                params=_NOT_SAMPLED,
                arrival_time=context.arrival_time,
                priority=context.tenant.priority_of(fields.priority),
                cache_salt="\0".join(filter(None, (context.tenant.salt, fields.cache_salt))),
                deadline=deadline,
                external_id=context.external_id,
                route=request.scope["path"],
                tenant=context.tenant.name,
                weight=context.tenant.weight,
                pooling=PoolingInput(params, prompt.token_types),
            )
            for prompt in prompts
        ]
        self._is_charged = False
        self.generations = []

    async def _submit_all(self) -> None:
        """Submit the first texts; ``pool`` submits the others."""
        await self._submit(self._requests[:_TEXTS_AT_ONCE])

    async def pool(self, request: Request) -> list[np.ndarray]:
        """Return the result of each text, and close the job.

        Raises:
            HttpError: 499, the client is gone. EngineError: a text failed.
        """

        async def pool_all() -> list[np.ndarray]:
            pooled: list[np.ndarray] = []
            while True:
                for generation in self.generations[len(pooled) :]:
                    (delta,) = await generation.collect()
                    if delta.pooled is None:
                        raise sample_error(delta.error)
                    pooled.append(delta.pooled)
                begin = len(self.generations)
                if begin == len(self._requests):
                    return pooled
                await self._submit(self._requests[begin : begin + _TEXTS_AT_ONCE])

        try:
            return await run_until_disconnect(request, pool_all())
        finally:
            self.close()

    @property
    def pooled_usage(self) -> dict[str, int]:
        """The ``usage`` object."""
        num_tokens = sum(each.stats.num_prompt_tokens for each in self.generations)
        return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


class PoolingServer:
    """The served model as routes pool with it."""

    def __init__(self, server: ServerContext):
        self.server = server
        self._model: PoolingModel | None = None

    def model(self, name: str | None) -> PoolingModel:
        """Return what is known of the model.

        Raises:
            HttpError: 404, it is not served under this name. InvalidRequestError: it generates.
        """
        self.server.check_model(name)
        if self._model is None:
            facts, tokenizer = self.server.engine.facts, self.server.prompts.tokenizer
            self._model = PoolingModel.of_facts(
                facts.info.get("pooling"), tokenizer, facts.vocab_size, facts.max_model_len
            )
        return self._model

    async def pool(
        self,
        request: Request,
        fields: PoolingFields,
        params: PoolingParams,
        texts: Sequence[Any],
        prompt: Callable[[Any], PoolingPrompt],
    ) -> tuple[list[Pooled], dict[str, int]]:
        """Pool what ``prompt`` makes of each text; return results, and the ``usage`` object."""

        def prompts() -> list[PoolingPrompt]:
            return [prompt(text) for text in texts]

        made = await run_until_disconnect(request, _run(_size_of(texts), prompts))
        job = PoolingJob(self.server, request, fields, made, params)
        await job.begin()
        arrays = await job.pool(request)
        pooled = [
            Pooled(array, each.stats.num_prompt_tokens)
            for array, each in zip(arrays, job.generations, strict=True)
        ]
        return pooled, job.pooled_usage


def _size_of(texts: Sequence[Any]) -> int:
    """Characters, or token ids, of all texts."""
    return sum(sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in texts)


async def _run(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    if size <= SMALL_TEXT:
        return await briefly_in_background(function, *args, **kwargs)
    return await in_background(function, *args, **kwargs)
