"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, in vLLM's form.

They read folders of this machine, so that they are for operators; and on a server without keys for
those that its own machine alone can reach.
"""

from __future__ import annotations

import logging

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from octavo.base.errors import ConfigError, ModelError
from octavo.server.api.fields import MAX_INT, Body
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.body import JsonRoute
from octavo.server.http.errors import HttpError

_log = logging.getLogger("octavo.server")


class LoadRequest(Body):
    """An adapter to load."""

    lora_name: str = Field(min_length=1, max_length=256, description="the model of requests for it")
    lora_path: str = Field(min_length=1, max_length=4096, description="a folder of the server's")
    load_inplace: bool | None = Field(None, description="replace the one with this name (no)")


class UnloadRequest(Body):
    """An adapter to unload."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = Field(None, ge=0, le=MAX_INT, description="vLLM's; the name counts")


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["LoRA"])

    @router.post(
        "/v1/load_lora_adapter",
        response_model=None,
        responses=describe(None),
    )
    async def load(body: LoadRequest) -> Response:
        """Read and check an adapter; requests have it by its name from then on."""
        _check_reach(server)
        try:
            await in_background(
                server.loras.load,
                body.lora_name,
                body.lora_path,
                server.engine.facts,
                replaces=bool(body.load_inplace),
            )
        except (ModelError, ConfigError) as error:
            raise HttpError(400, str(error), param="lora_path") from error
        _log.info("adapter %s was loaded", body.lora_name)
        return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(
        "/v1/unload_lora_adapter",
        response_model=None,
        responses=describe(None),
    )
    async def unload(body: UnloadRequest) -> Response:
        """Forget an adapter. Requests that have it go on."""
        _check_reach(server)
        if not server.loras.unload(body.lora_name):
            raise HttpError(
                404,
                f"The adapter {body.lora_name!r} is not loaded.",
                param="lora_name",
                code="model_not_found",
            )
        _log.info("adapter %s was unloaded", body.lora_name)
        return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _check_reach(server: ServerContext) -> None:
    settings = server.settings
    if server.models is not None:
        raise HttpError(400, "Adapters are of a server's only model, and this one has several.")
    has_keys = bool(settings.api_key or settings.admin_key or settings.api_key_file)
    if not settings.is_loopback and not has_keys:
        raise HttpError(
            403,
            "This server has no keys and can be reached from other machines: adapters are loaded "
            "with --lora when it starts, or by an operator's key (octavo serve --admin-key).",
            code="admin_key_needed",
        )


def _text(message: str) -> Response:
    return Response(message, media_type="text/plain; charset=utf-8")
