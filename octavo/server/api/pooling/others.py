"""Embeddings in the forms of llama.cpp's server, text-embeddings-inference and Ollama."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from octavo.core.pooling_params import PoolingParams
from octavo.server.api.ollama.routes import OllamaRoute, describe_ollama
from octavo.server.api.pooling import body as protocol
from octavo.server.api.pooling.body import (
    LlamaEmbeddingRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    TeiEmbedRequest,
    inputs_of,
)
from octavo.server.api.pooling.job import PoolingServer
from octavo.server.api.pooling.routes import json_response, pool_texts, vector_writer
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.body import JsonRoute
from octavo.server.http.json_text import encode


def create_router(server: ServerContext) -> APIRouter:
    """Return the routes of llama.cpp's server and of text-embeddings-inference."""
    router = APIRouter(route_class=JsonRoute, tags=["embeddings"])
    pooling = PoolingServer(server)

    @router.post("/embedding", response_model=None, responses=describe(protocol.LlamaEmbedding))
    @router.post("/embeddings", response_model=None, responses=describe(protocol.LlamaEmbedding))
    async def embed_llama(body: LlamaEmbeddingRequest, request: Request) -> Response:
        """Embed texts, in the form of llama.cpp's server."""
        normalize = body.use_activation if body.embd_normalize is None else body.embd_normalize == 2
        params = PoolingParams("embed", None, normalize)
        pooled, _ = await pool_texts(pooling, body, request, params, inputs_of(body.content))
        vector = vector_writer(body.encoding_format)

        def write() -> str:
            return encode(
                [
                    {"index": index, "embedding": vector(each.data[None])}
                    for index, each in enumerate(pooled)
                ]
            )

        return await json_response(write, pooled)

    @router.post("/embed", response_model=None, responses=describe(protocol.EmbeddingResponse))
    async def embed_tei(body: TeiEmbedRequest, request: Request) -> Response:
        """Embed texts, in the form of text-embeddings-inference: a list of vectors."""
        normalize = body.use_activation if body.normalize is None else body.normalize
        params = PoolingParams("embed", body.dimensions, normalize)
        pooled, _ = await pool_texts(
            pooling,
            body,
            request,
            params,
            inputs_of(body.inputs),
            prompt_name=body.prompt_name,
            truncate=-1 if body.truncate else None,
        )
        return await json_response(lambda: encode([each.data.tolist() for each in pooled]), pooled)

    return router


def create_ollama_router(server: ServerContext) -> APIRouter:
    """Return Ollama's routes of embeddings."""
    router = APIRouter(route_class=OllamaRoute, tags=["Ollama"])
    pooling = PoolingServer(server)

    @router.post(
        "/api/embed", response_model=None, responses=describe_ollama(protocol.OllamaEmbedResponse)
    )
    async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
        """Embed texts, in Ollama's form."""
        begin = time.perf_counter_ns()
        params = PoolingParams("embed", body.dimensions, True)
        truncate = None if body.truncate is False else -1
        texts = inputs_of(body.input)
        pooled, usage = await pool_texts(pooling, body, request, params, texts, truncate=truncate)

        def write() -> str:
            return encode(
                {
                    "model": body.model or server.model_names[0],
                    "embeddings": [each.data.tolist() for each in pooled],
                    "total_duration": time.perf_counter_ns() - begin,
                    "load_duration": 0,
                    "prompt_eval_count": usage["prompt_tokens"],
                }
            )

        return await json_response(write, pooled)

    @router.post(
        "/api/embeddings",
        response_model=None,
        responses=describe_ollama(protocol.OllamaEmbeddingsResponse),
    )
    async def embed_one(body: OllamaEmbeddingsRequest, request: Request) -> Response:
        """Embed one text, in Ollama's older form."""
        params = PoolingParams("embed", None, True)
        pooled, _ = await pool_texts(pooling, body, request, params, [body.prompt], truncate=-1)
        return await json_response(lambda: encode({"embedding": pooled[0].data.tolist()}), pooled)

    return router
