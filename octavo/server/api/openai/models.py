"""``GET /v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from octavo.base.errors import EngineUnavailableError
from octavo.server.api.answers import Model, ModelList
from octavo.server.api.responses import describe
from octavo.server.api.service import Service
from octavo.server.http.json_text import encode


def create_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", response_model=None, responses=describe(ModelList))
    async def list_models() -> Response:
        """The served model, under each of its names."""
        models = [_describe_model(service, name) for name in service.model_names]
        return _json({"object": "list", "data": models})

    @router.get("/v1/models/{model_id:path}", response_model=None, responses=describe(Model))
    async def retrieve_model(model_id: str) -> Response:
        """The served model, under one of its names."""
        service.check_model(model_id)
        return _json(_describe_model(service, model_id))

    return router


def _describe_model(service: Service, name: str) -> dict[str, Any]:
    try:
        facts = service.engine.facts
    except EngineUnavailableError:  # it is still loading
        facts = None
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": facts and facts.max_model_len,
        "sampling_defaults": facts and facts.sampling_defaults,
        "permission": [],
    }


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
