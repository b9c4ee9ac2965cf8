"""``GET /octavo/deployment``, the served model, its device and settings for the page's formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from octavo.base.errors import ConfigError, ModelError
from octavo.cost.hardware import Device
from octavo.cost.open_spec import open_spec
from octavo.cost.this_machine import device_of_engine
from octavo.planner.page_export import hardware_json, model_json
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import EngineFacts
from octavo.server.http.background import in_background
from octavo.server.http.body import JsonRoute
from octavo.server.http.json_text import encode


class DeploymentResponse(BaseModel):
    """The served model and its device, as in ``models`` and ``devices`` of docs/planning.md, and
    settings.

    ``unknown`` says why a part is null.
    """

    model: dict[str, Any] | None = Field(description="its shape, and its weights as stored")
    hardware: dict[str, Any] | None = Field(description="one device, and what is reached on it")
    settings: dict[str, int] = Field(description="max_model_len, max_num_seqs, step_tokens")
    unknown: list[str]


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["planning"])

    @router.get("/octavo/deployment", response_model=None, responses=describe(DeploymentResponse))
    async def deployment() -> Response:
        """Return the served model, its device and its settings, for the planner's formulas."""
        text = await in_background(_deployment_text, server)
        return Response(text, media_type="application/json")

    return router


def _deployment_text(server: ServerContext) -> str:
    """Return the answer as JSON; EngineUnavailableError before the engine has been ready."""
    facts = server.engine.facts
    settings = {
        "max_model_len": facts.max_model_len,
        "max_num_seqs": facts.max_num_seqs,
        "step_tokens": facts.max_num_batched_tokens,
    }
    unknown: list[str] = []
    model = hardware = None
    try:
        model = _model(server.model_path, server.model_names[0])
        settings["max_model_len"] = min(facts.max_model_len, model["max_position"])
    except (ConfigError, ModelError) as error:
        unknown.append(f"model: {_without_folder(str(error), server.model_path)}")
    try:
        hardware = hardware_json([_device(facts)])
    except ConfigError as error:
        unknown.append(f"hardware: {error}")
    found = {"model": model, "hardware": hardware, "settings": settings, "unknown": unknown}
    return encode(found)


@cache
def _model(path: Path | None, name: str) -> dict[str, Any]:
    """Return the model's description, which is read once: it stays as it was loaded.

    Raises:
        ConfigError, ModelError: it cannot be described.
    """
    if path is None:
        raise ConfigError("its files are not known")
    return {**model_json(open_spec(path)), "name": name}


def _without_folder(text: str, path: Path | None) -> str:
    """Return a message without the folder of the model, which clients must not learn."""
    return text if path is None else text.replace(str(path), path.name)


def _device(facts: EngineFacts) -> Device:
    """Return the engine's device, without the file of its measured peaks; ConfigError if
    unknown."""
    device = device_of_engine(str(facts.runs_as.get("device", "cpu")))
    return replace(device, source="measured here") if device.is_measured else device
