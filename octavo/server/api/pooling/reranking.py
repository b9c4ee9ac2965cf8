"""Routes that sort documents by how well they answer a query, in the forms of Jina and Cohere (as
vLLM's and llama.cpp's servers have them) and of text-embeddings-inference."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, RootModel, Tag

from octavo.server.api.pooling import body as protocol
from octavo.server.api.pooling.body import RerankRequest, TeiRerankRequest
from octavo.server.api.pooling.job import PoolingServer
from octavo.server.api.pooling.routes import score_pairs
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.body import JsonRoute
from octavo.server.http.json_text import encode


def _form_of(value: Any) -> str:
    keys = value.model_fields_set if isinstance(value, BaseModel) else value
    return "tei" if "texts" in keys else "jina"


class AnyRerankRequest(
    RootModel[
        Annotated[
            Annotated[RerankRequest, Tag("jina")] | Annotated[TeiRerankRequest, Tag("tei")],
            Discriminator(_form_of),
        ]
    ]
):
    """A query, and documents to sort by how well they answer it."""


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["embeddings"])
    pooling = PoolingServer(server)
    described = describe(protocol.RerankResponse)

    def rerank_at(path: str) -> Callable[[Any], Any]:
        return router.post(path, response_model=None, responses=described)

    @rerank_at("/v1/rerank")
    @rerank_at("/v2/rerank")
    @rerank_at("/reranking")
    @rerank_at("/v1/reranking")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Sort documents by how well they answer a query, best first."""
        return await _rerank(pooling, body, request)

    @router.post("/rerank", response_model=None, responses=described)
    async def rerank_either(body: AnyRerankRequest, request: Request) -> Response:
        """Sort documents by how well they answer a query, best first; with ``texts`` in the form
        of text-embeddings-inference."""
        if isinstance(body.root, TeiRerankRequest):
            return await _rerank_tei(pooling, body.root, request)
        return await _rerank(pooling, body.root, request)

    return router


async def _rerank(pooling: PoolingServer, body: RerankRequest, request: Request) -> Response:
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    scores, usage = await score_pairs(pooling, body, request, [body.query], texts)
    results: list[dict[str, Any]] = []
    for index in _order(scores)[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    server = pooling.server
    found = {
        "id": f"rerank-{body.request_id or uuid.uuid4().hex}",
        "object": "list",
        "model": body.model or server.model_names[0],
        "results": results,
        "usage": usage,
        # Where Cohere's clients look.
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }
    return Response(encode(found), media_type="application/json")


async def _rerank_tei(pooling: PoolingServer, body: TeiRerankRequest, request: Request) -> Response:
    scores, _ = await score_pairs(
        pooling,
        body,
        request,
        [body.query],
        list(body.texts),
        use_activation=False if body.raw_scores else None,
        truncate=-1 if body.truncate else None,
    )
    ranks: list[dict[str, Any]] = []
    for index in _order(scores):
        rank: dict[str, Any] = {"index": index, "score": scores[index]}
        if body.return_text:
            rank["text"] = body.texts[index]
        ranks.append(rank)
    return Response(encode(ranks), media_type="application/json")


def _order(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])
