"""``POST /octavo/spec``: a model's shape from its ``config.json``, for the page's formulas.

The page reads most configs by itself; this knows every kind that can be planned.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from octavo.cost.model_spec import ModelSpec
from octavo.errors import ConfigError, ModelError
from octavo.planner.building_blocks import model_json
from octavo.server.api.fields import Body, Object
from octavo.server.api.responses import describe
from octavo.server.api.service import Service
from octavo.server.http.background import in_background
from octavo.server.http.body import JsonRoute
from octavo.server.http.errors import HttpError
from octavo.server.http.json_text import encode

MAX_NAME_CHARS = 200


class SpecRequest(Body):
    """The shape of a model."""

    config: Object = Field(description="the contents of its config.json")
    name: str = Field("config.json", max_length=MAX_NAME_CHARS)


class SpecResponse(BaseModel):
    """What docs/planning.md has of ``models``; fields with their defaults are left out."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    parameters: int
    active_parameters: int
    layers: list[dict[str, Any]]
    order: list[list[int]]


def create_router(service: Service) -> APIRouter:
    """``service`` is not needed: no model is looked at but the one that is sent."""
    router = APIRouter(route_class=JsonRoute, tags=["planning"])

    @router.post("/octavo/spec", response_model=None, responses=describe(SpecResponse))
    async def spec(body: SpecRequest) -> Response:
        """A model's shape from its config."""
        return Response(await in_background(_spec_text, body), media_type="application/json")

    return router


def _spec_text(asked: SpecRequest) -> str:
    """HttpError, 400, for a config that makes no sense, or of a kind that is not known."""
    try:
        found = model_json(ModelSpec.of_hf(asked.config, path=asked.name))
    except (ConfigError, ModelError) as error:
        raise HttpError(400, str(error), param="config") from error
    return encode({**found, "name": asked.name})
