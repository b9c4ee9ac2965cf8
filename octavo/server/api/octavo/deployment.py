"""``GET /octavo/deployment``, the served model, its device and settings, and ``POST
/octavo/deployments``, models on devices as the documents that the page evaluates."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from octavo.base.errors import ConfigError, ModelError
from octavo.cost.catalogue import spec_of
from octavo.cost.engine_profile import Limits
from octavo.cost.model_spec import ModelSpec
from octavo.cost.open_spec import open_spec
from octavo.page.deployments import (
    EngineChoice,
    device_by_name,
    document_or_error,
    engine_device,
)
from octavo.planner.page_export import hardware_json, model_json
from octavo.server.api.fields import MAX_INT, Body, Object
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.body import JsonRoute
from octavo.server.http.bounded_subprocess import BoundedSubprocess
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError
from octavo.server.http.json_text import encode
from octavo.server.http.sse import run_until_disconnect

MAX_LAYOUTS = 16
MAX_SECONDS = 20.0  # of a processor, for a config that was uploaded
_MAX_CHARS = 200
_MAX_DEGREE = 1 << 16
_REMEMBERED = 512  # documents, of 10 kB


class DeploymentResponse(BaseModel):
    """The served model and its device, as docs/planning.md has them, and settings.

    ``unknown`` says why a part is null.
    """

    model: dict[str, Any] | None = Field(description="its shape, and its weights as stored")
    hardware: dict[str, Any] | None = Field(description="one device, and what is reached on it")
    settings: dict[str, int] = Field(description="max_model_len, max_num_seqs, step_tokens")
    unknown: list[str]


class Layout(Body):
    """The layout of one replica over devices."""

    tp: int = Field(1, ge=1, le=_MAX_DEGREE)
    pp: int = Field(1, ge=1, le=_MAX_DEGREE)
    ep: int = Field(1, ge=1, le=_MAX_DEGREE)
    dp: int = Field(1, ge=1, le=_MAX_DEGREE)

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        return self.tp, self.pp, self.ep, self.dp


class DeploymentsRequest(Body):
    """A model on a device, and the layouts to compare."""

    model: str | None = Field(
        None, max_length=_MAX_CHARS, description="a name of the catalogue; null: the served model"
    )
    config: Object | None = Field(
        None, description="the contents of the config.json of a model that is called so"
    )
    hardware: str = Field(
        max_length=_MAX_CHARS, description="a device by its name; auto: the engine's device"
    )
    quantization: str | None = Field(
        None, max_length=_MAX_CHARS, description="of the weights; null: as they were published"
    )
    kv_cache_dtype: str | None = Field(None, max_length=_MAX_CHARS)
    engine: str = Field("octavo", max_length=_MAX_CHARS, description="whose rules of memory hold")
    max_model_len: int | None = Field(None, ge=1, le=MAX_INT)
    max_num_seqs: int | None = Field(None, ge=1, le=MAX_INT)
    max_num_batched_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    layouts: list[Layout] = Field(min_length=1, max_length=MAX_LAYOUTS, fail_fast=True)

    @property
    def choice(self) -> EngineChoice:
        limits = Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        return EngineChoice(
            engine=self.engine,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            limits=limits,
        )


class DeploymentsResponse(BaseModel):
    """Answers for the layouts, in their order: ``document`` as docs/planning.md describes it,
    without ``golden``; or ``error``, why the model cannot be laid out so."""

    deployments: list[dict[str, Any]]


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["planning"])
    reader = BoundedSubprocess("octavo.page.deployments", "planning a model", MAX_SECONDS)

    @router.get("/octavo/deployment", response_model=None, responses=describe(DeploymentResponse))
    async def deployment() -> Response:
        """Return the served model, its device and its settings."""
        text = await in_background(_deployment_text, server)
        return Response(text, media_type="application/json")

    @router.post(
        "/octavo/deployments", response_model=None, responses=describe(DeploymentsResponse)
    )
    async def deployments(body: DeploymentsRequest, request: Request) -> Response:
        """Return what the steps, the memory and the cost of a model on a device follow from."""
        answering = (
            in_background(_deployments_text, server, body)
            if body.config is None
            else reader.answer(_question(body, server), request_context(request).tenant.name)
        )
        text = await run_until_disconnect(request, answering)
        return Response(text, media_type="application/json")

    return router


# -- the served model -----------------------------------------------------------------------------


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
        spec = _served_spec(server.model_path, server.model_names[0])
        model = model_json(spec)
        settings["max_model_len"] = min(facts.max_model_len, spec.max_position)
    except (ConfigError, ModelError) as error:
        unknown.append(f"model: {_without_folder(str(error), server.model_path)}")
    try:
        hardware = hardware_json([engine_device(_engine_kind(server))])
    except ConfigError as error:
        unknown.append(f"hardware: {error}")
    found = {"model": model, "hardware": hardware, "settings": settings, "unknown": unknown}
    return encode(found)


@cache
def _served_spec(path: Path | None, name: str) -> ModelSpec:
    """Return the shape of the served model, which is read once: it stays as it was loaded.

    Raises:
        ConfigError, ModelError: it cannot be described.
    """
    if path is None:
        raise ConfigError("its files are not known")
    return replace(open_spec(path), name=name)


def _without_folder(text: str, path: Path | None) -> str:
    """Return a message without the folder of the model, which clients must not learn."""
    return text if path is None else text.replace(str(path), path.name)


def _engine_kind(server: ServerContext) -> str:
    return str(server.engine.facts.runs_as.get("device", "cpu"))


# -- any model ------------------------------------------------------------------------------------


def _deployments_text(server: ServerContext, body: DeploymentsRequest) -> str:
    """Return the answer about a model of the catalogue, or the served one, as JSON.

    Raises:
        HttpError: 400, the model or the device is unknown.
        EngineUnavailableError: the engine's device is asked for, and it has not been ready yet.
    """
    model: str | tuple[Path | None, str] = body.model or (server.model_path, server.model_names[0])
    kind = _engine_kind(server) if body.hardware == "auto" else ""
    try:
        found = [
            _document_or_error(model, body.hardware, kind, body.choice, layout.degrees)
            for layout in body.layouts
        ]
    except (ConfigError, ModelError) as error:
        raise HttpError(400, _without_folder(str(error), server.model_path)) from None
    return encode({"deployments": found})


@lru_cache(maxsize=_REMEMBERED)
def _document_or_error(
    model: str | tuple[Path | None, str],
    hardware: str,
    engine_kind: str,
    choice: EngineChoice,
    degrees: tuple[int, int, int, int],
) -> dict[str, Any]:
    spec = _catalogue_spec(model) if isinstance(model, str) else _served_spec(*model)
    return document_or_error(spec, device_by_name(hardware, engine_kind), choice, degrees)


@lru_cache(maxsize=16)
def _catalogue_spec(name: str) -> ModelSpec:
    return spec_of(name)


def _question(body: DeploymentsRequest, server: ServerContext) -> dict[str, Any]:
    """Return the question for octavo.page.deployments about a config that was uploaded."""
    return {
        "config": body.config,
        "name": body.model or "config.json",
        "hardware": body.hardware,
        "engine_kind": _engine_kind(server) if body.hardware == "auto" else "",
        "choice": asdict(body.choice),
        "layouts": [layout.degrees for layout in body.layouts],
    }
