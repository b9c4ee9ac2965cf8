"""``GET /v1/models``: the served model under its names, or all models of a server with several."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from octavo.base.errors import EngineUnavailableError
from octavo.server.api.answers import Model, ModelList
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ModelDirectory, ModelStatus, ServerContext
from octavo.server.http.json_text import encode


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", response_model=None, responses=describe(ModelList))
    async def list_models(reload: bool = False) -> Response:
        """List the served models, each under each of its names, and their adapters. ``reload``
        looks again into the folder of models, where there is one."""
        if server.models is not None:
            return _json(await _list_all(server, server.models, reload))
        names = (*server.model_names, *(each.name for each in server.loras.all()))
        models = [_describe_model(server, name) for name in names]
        return _json({"object": "list", "data": models})

    @router.get("/v1/models/{model_id:path}", response_model=None, responses=describe(Model))
    async def retrieve_model(model_id: str) -> Response:
        """Describe a served model, under one of its names, or an adapter."""
        if server.models is not None:
            status = server.models.status_of(model_id)
            return _json(_describe_one(server, server.models, status, model_id))
        server.check_model(model_id)
        return _json(_describe_model(server, model_id))

    return router


async def _list_all(server: ServerContext, models: ModelDirectory, reload: bool) -> dict[str, Any]:
    if reload:
        await models.rescan()
    described = [
        _describe_one(server, models, status, name)
        for status in models.list()
        for name in status.names
    ]
    return {"object": "list", "data": described, "model_memory": models.budget_bytes}


def _describe_one(
    server: ServerContext, models: ModelDirectory, status: ModelStatus, name: str
) -> dict[str, Any]:
    context = models.context_of(name)
    return {
        **_description(server.created, name, status.names[0], context),
        "status": {
            "value": status.state,
            "failed": status.failure is not None,
            "error": status.failure,
        },
        "memory_bytes": status.memory_bytes,
        "pinned": status.is_pinned,
        "num_requests": status.num_requests,
        "unload_after": status.unload_after and round(status.unload_after, 1),
    }


def _describe_model(server: ServerContext, name: str) -> dict[str, Any]:
    root = server.model_names[0]
    if server.loras.find(name) is not None:
        return _description(server.created, name, name, server, parent=root)
    return _description(server.created, name, root, server)


def _description(
    created: int, name: str, root: str, context: ServerContext | None, *, parent: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's fields, and the context's length, once it is known."""
    try:
        facts = None if context is None else context.engine.facts
    except EngineUnavailableError:  # it is still loading
        facts = None
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "octavo",
        "root": root,
        "parent": parent,
        "max_model_len": facts and facts.max_model_len,
        "sampling_defaults": facts and facts.sampling_defaults,
        "permission": [],
    }


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
