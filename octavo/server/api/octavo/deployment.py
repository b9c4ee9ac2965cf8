"""``GET /octavo/deployment``: the model that is served, what it runs on, and how it is set, for the
page's formulas: "this server" in its pictures.
"""

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
from octavo.planner.building_blocks import hardware_json, model_json
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import EngineFacts
from octavo.server.http.background import in_background
from octavo.server.http.body import JsonRoute
from octavo.server.http.json_text import encode


class DeploymentResponse(BaseModel):
    """What docs/planning.md has of ``models`` and ``devices``, and what this engine is set to.

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
        """What is served here, for the planner's formulas."""
        text = await in_background(_deployment_text, server)
        return Response(text, media_type="application/json")

    return router


def _deployment_text(server: ServerContext) -> str:
    """EngineUnavailableError before the engine has been ready."""
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
    """Read once: what is served stays as it was when it was loaded. ConfigError or ModelError."""
    if path is None:
        raise ConfigError("its files are not known")
    return {**model_json(open_spec(path)), "name": name}


def _without_folder(text: str, path: Path | None) -> str:
    """Clients need not know where files lie."""
    return text if path is None else text.replace(str(path), path.name)


def _device(facts: EngineFacts) -> Device:
    """ConfigError if it is not known. Where its ceilings are kept is nobody's concern."""
    device = device_of_engine(str(facts.runs_as.get("device", "cpu")))
    return replace(device, source="measured here") if device.is_measured else device
