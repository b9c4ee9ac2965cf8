"""``POST /octavo/spec``, a model's shape from its ``config.json``: any kind that can be planned.

The page has a config checked by it when its user picks one.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from octavo.server.api.fields import Body, Object
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.body import JsonRoute
from octavo.server.http.bounded_subprocess import BoundedSubprocess
from octavo.server.http.context import request_context
from octavo.server.http.sse import run_until_disconnect

MAX_SECONDS = 20.0
MAX_NAME_CHARS = 200


class SpecRequest(Body):
    """A model's config."""

    config: Object = Field(description="the contents of its config.json")
    name: str = Field("config.json", max_length=MAX_NAME_CHARS)


class SpecResponse(BaseModel):
    """The model as in ``models`` of docs/planning.md; fields with their defaults are left out."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    parameters: int
    active_parameters: int
    layers: list[dict[str, Any]]
    order: list[list[int]]


def create_router(server: ServerContext) -> APIRouter:
    """Return the route. ``server`` is not used: only the config that is sent matters."""
    router = APIRouter(route_class=JsonRoute, tags=["planning"])
    reader = BoundedSubprocess("octavo.page.spec_reader", "reading a config", MAX_SECONDS)

    @router.post("/octavo/spec", response_model=None, responses=describe(SpecResponse))
    async def spec(body: SpecRequest, request: Request) -> Response:
        """Return a model's shape from its config."""
        asking = reader.answer(body.model_dump(), request_context(request).tenant.name)
        text = await run_until_disconnect(request, asking)
        return Response(text, media_type="application/json")

    return router
