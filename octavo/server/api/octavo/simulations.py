"""``POST /octavo/simulate``: what a server would make of a load, for the page's simulator.

It takes seconds of one processor, so a process of its own does it, one at a time: nothing that is
served waits for it.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from octavo.cost.find_device import AUTO
from octavo.server.api.fields import Body, Object
from octavo.server.api.responses import describe
from octavo.server.api.service import Service
from octavo.server.http.body import JsonRoute
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError
from octavo.server.http.own_process import OwnProcess
from octavo.server.http.sse import run_until_disconnect

MAX_SECONDS = 60.0
_MAX_CHARS = 200


class SimulationRequest(Body):
    """What serves. All else is the same for all: see octavo.page.serving_runs."""

    model: str | None = Field(
        None, max_length=_MAX_CHARS, description="a name of the catalogue; null: what is served"
    )
    config: Object | None = Field(
        None, description="the contents of the config.json of a model that is called so"
    )
    hardware: str = Field(
        max_length=_MAX_CHARS, description="a device by its name; auto: what the engine runs on"
    )
    dtype: str | None = Field(None, max_length=_MAX_CHARS)
    quantization: str | None = Field(None, max_length=_MAX_CHARS)
    kv_cache_dtype: str | None = Field(None, max_length=_MAX_CHARS)
    batching: Literal["continuous", "static"] = "continuous"
    prefix_caching: bool = True
    step_tokens: int = Field(2048, ge=64, le=32768)
    max_num_seqs: int = Field(32, ge=1, le=512)
    replicas: int = Field(1, ge=1, le=4)


class SimulationResponse(BaseModel):
    """Runs at several rates, as octavo.page.serving_runs tells them."""

    made: dict[str, str]
    settings: dict[str, Any]
    usual_rate: float
    runs: list[dict[str, Any]]


def create_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["planning"])
    simulator = OwnProcess("octavo.page.serving_runs", "a simulation", MAX_SECONDS)

    @router.post("/octavo/simulate", response_model=None, responses=describe(SimulationResponse))
    async def simulate(body: SimulationRequest, request: Request) -> Response:
        """A load on a simulated server, at rates from little to too much."""
        tenant = request_context(request).tenant.name
        answering = simulator.answer(_question(body, service), tenant)
        text = await run_until_disconnect(request, answering)
        return Response(text, media_type="application/json")

    return router


def _question(body: SimulationRequest, service: Service) -> dict[str, Any]:
    """For octavo.page.serving_runs.

    Raises:
        HttpError: 400, the model has no name.
        EngineUnavailableError: what an engine runs on is asked for that has not been ready yet.
    """
    question = body.model_dump()
    if body.hardware == AUTO:
        question["device"] = str(service.engine.facts.runs_as.get("device", "cpu"))
    if body.model is not None:
        return question
    if body.config is not None or service.model_path is None:
        raise HttpError(400, "model: give its name", param="model")
    return {**question, "model": service.model_names[0], "path": str(service.model_path)}
