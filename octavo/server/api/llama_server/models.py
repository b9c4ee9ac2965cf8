"""``POST /models/load`` and ``/models/unload``, as llama-server's router has them."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from octavo.server.api.fields import Body, Label
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ModelDirectory
from octavo.server.http.body import JsonRoute


class UnloadRequest(Body):
    model: Label = Field(description="one of /v1/models")


class LoadRequest(UnloadRequest):
    refused = frozenset({"extra_args"})  # llama-server's: arguments for a process of its own

    pin: bool | None = Field(
        None, description="whether it stays whatever else needs room, and however long it is idle"
    )


class Success(BaseModel):
    success: bool


def create_router(models: ModelDirectory) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["llama-server"])

    @router.post("/v1/models/load", response_model=None, responses=describe(Success))
    async def load(body: LoadRequest) -> JSONResponse:
        """Begin to load a model: /models says when it is loaded, or why it cannot be."""
        models.load(body.model, pin=body.pin)
        return JSONResponse({"success": True})

    @router.post("/v1/models/unload", response_model=None, responses=describe(Success))
    async def unload(body: UnloadRequest) -> JSONResponse:
        """Unload a model as soon as its requests are over."""
        models.unload(body.model)
        return JSONResponse({"success": True})

    return router
