"""``GET /v1/models``, the served model under its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from octavo.base.errors import EngineUnavailableError
from octavo.server.api.answers import Model, ModelList
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.json_text import encode


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", response_model=None, responses=describe(ModelList))
    async def list_models() -> Response:
        """List the served model, under each of its names, and its adapters."""
        names = (*server.model_names, *(each.name for each in server.loras.all()))
        models = [_describe_model(server, name) for name in names]
        return _json({"object": "list", "data": models})

    @router.get("/v1/models/{model_id:path}", response_model=None, responses=describe(Model))
    async def retrieve_model(model_id: str) -> Response:
        """Describe the served model, under one of its names, or an adapter."""
        server.check_model(model_id)
        return _json(_describe_model(server, model_id))

    return router


def _describe_model(server: ServerContext, name: str) -> dict[str, Any]:
    try:
        facts = server.engine.facts
    except EngineUnavailableError:  # it is still loading
        facts = None
    lora = server.loras.find(name)
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "octavo",
        "root": server.model_names[0] if lora is None else name,
        "parent": None if lora is None else server.model_names[0],
        "max_model_len": facts and facts.max_model_len,
        "sampling_defaults": facts and facts.sampling_defaults,
        "permission": [],
    }


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
