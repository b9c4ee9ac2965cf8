"""OpenAI's ``/v1/embeddings``, and vLLM's routes of pooling, scores and labels."""

from __future__ import annotations

import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from octavo.base.errors import InvalidRequestError
from octavo.core.pooling_params import PoolingParams
from octavo.server.api.pooling import body as protocol
from octavo.server.api.pooling.body import (
    ClassifyRequest,
    EmbeddingRequest,
    EncodingFields,
    PoolingFields,
    PoolingRequest,
    ScoreRequest,
    inputs_of,
)
from octavo.server.api.pooling.job import PoolingServer
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.body import JsonRoute
from octavo.server.http.json_text import encode
from octavo.serving.pooling_model import Pooled
from octavo.serving.pooling_texts import PoolingPrompt

if TYPE_CHECKING:
    import numpy as np

# Numbers of an answer, beyond which its JSON is written in the background.
_MANY_NUMBERS = 4096


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["embeddings"])
    pooling = PoolingServer(server)

    @router.post(
        "/v1/embeddings", response_model=None, responses=describe(protocol.EmbeddingResponse)
    )
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts."""
        params = PoolingParams("embed", body.dimensions, body.use_activation)
        pooled, usage = await _pool(pooling, body, request, params)
        vector = vector_writer(body.encoding_format)

        def data() -> list[dict[str, Any]]:
            return [
                {"object": "embedding", "index": index, "embedding": vector(each.data)}
                for index, each in enumerate(pooled)
            ]

        return await answer(server, body, "embd", data, pooled, usage)

    @router.post("/pooling", response_model=None, responses=describe(protocol.PoolingResponse))
    async def pool(body: PoolingRequest, request: Request) -> Response:
        """Pool texts: to an embedding, a vector for each token, or scores of labels."""
        task = body.task or pooling.model(body.model).facts.pooling.task
        params = PoolingParams(task, body.dimensions, body.use_activation)
        pooled, usage = await _pool(pooling, body, request, params)
        vector = vector_writer(body.encoding_format)

        def data() -> list[dict[str, Any]]:
            return [
                {"object": "pooling", "index": index, "data": vector(each.data)}
                for index, each in enumerate(pooled)
            ]

        return await answer(server, body, "pool", data, pooled, usage)

    @router.post("/classify", response_model=None, responses=describe(protocol.ClassifyResponse))
    @router.post("/v1/classify", response_model=None, responses=describe(protocol.ClassifyResponse))
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Score the labels of a classifier for texts."""
        params = PoolingParams("classify", None, body.use_activation)
        labels = pooling.model(body.model).labels
        pooled, usage = await _pool(pooling, body, request, params)

        def data() -> list[dict[str, Any]]:
            return [
                {
                    "index": index,
                    "label": labels[int(each.data.argmax())],
                    "probs": each.data.tolist(),
                    "num_classes": len(labels),
                }
                for index, each in enumerate(pooled)
            ]

        return await answer(server, body, "classify", data, pooled, usage)

    @router.post("/score", response_model=None, responses=describe(protocol.ScoreResponse))
    @router.post("/v1/score", response_model=None, responses=describe(protocol.ScoreResponse))
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Score pairs of texts."""
        first, second = inputs_of(body.data_1), inputs_of(body.data_2)
        scores, usage = await score_pairs(pooling, body, request, first, second)

        def data() -> list[dict[str, Any]]:
            return [
                {"index": index, "object": "score", "score": each}
                for index, each in enumerate(scores)
            ]

        return await answer(server, body, "score", data, (), usage)

    return router


async def _pool(
    pooling: PoolingServer,
    body: EncodingFields | ClassifyRequest,
    request: Request,
    params: PoolingParams,
) -> tuple[list[Pooled], dict[str, int]]:
    assert isinstance(body, (EmbeddingRequest, PoolingRequest, ClassifyRequest))
    return await pool_texts(
        pooling,
        body,
        request,
        params,
        inputs_of(body.input),
        prompt_name=body.prompt_name if isinstance(body, EncodingFields) else None,
        add_special_tokens=body.add_special_tokens is not False,
    )


async def pool_texts(
    pooling: PoolingServer,
    body: PoolingFields,
    request: Request,
    params: PoolingParams,
    texts: Sequence[Any],
    *,
    prompt_name: str | None = None,
    add_special_tokens: bool = True,
    truncate: int | None = None,
) -> tuple[list[Pooled], dict[str, int]]:
    """Pool texts; return their results, and the ``usage`` object.

    Args:
        truncate: in place of the body's ``truncate_prompt_tokens``, if that is not given.
    """
    model = pooling.model(body.model)
    model.facts.check(params)
    most = truncate if body.truncate_prompt_tokens is None else body.truncate_prompt_tokens

    def prompt(text: Any) -> PoolingPrompt:
        return model.texts.single(
            text, prompt=prompt_name, truncate=most, add_special_tokens=add_special_tokens
        )

    return await pooling.pool(request, body, params, texts, prompt)


async def score_pairs(
    pooling: PoolingServer,
    body: PoolingFields,
    request: Request,
    first: list[Any],
    second: list[Any],
    *,
    use_activation: bool | None = None,
    truncate: int | None = None,
) -> tuple[list[float], dict[str, int]]:
    """Score pairs of texts, of which the first may be one for all; return the scores, and the
    ``usage`` object."""
    if not all(isinstance(text, str) for text in (*first, *second)):
        raise InvalidRequestError("must be texts", "data_1")
    asked = body.use_activation if use_activation is None else use_activation
    scoring = pooling.model(body.model).score(first, second, asked)
    most = truncate if body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
    prompt = partial(scoring.prompt, truncate=most)
    pooled, usage = await pooling.pool(request, body, scoring.params, scoring.texts, prompt)
    arrays = [each.data for each in pooled]
    return [scoring.score(*(arrays[use] for use in uses)) for uses in scoring.uses], usage


def vector_writer(encoding_format: str | None) -> Callable[[np.ndarray], Any]:
    """Return the function that makes an array what JSON has for it."""
    if encoding_format == "base64":
        return lambda array: b64encode(array.astype("<f4", copy=False).tobytes()).decode()
    return lambda array: array.tolist()


async def answer(
    server: ServerContext,
    body: PoolingFields,
    prefix: str,
    data: Callable[[], list[dict[str, Any]]],
    pooled: Sequence[Pooled],
    usage: dict[str, int],
) -> Response:
    """Return a list in OpenAI's form, written off the event loop if it is long."""

    def write() -> str:
        return encode(
            {
                "id": f"{prefix}-{body.request_id or uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": body.model or server.model_names[0],
                "data": data(),
                "usage": usage,
            }
        )

    return await json_response(write, pooled)


async def json_response(write: Callable[[], str], pooled: Sequence[Pooled]) -> Response:
    """Return the JSON that ``write`` makes of results."""
    is_large = sum(each.data.size for each in pooled) > _MANY_NUMBERS
    text = await in_background(write) if is_large else write()
    return Response(text, media_type="application/json")
