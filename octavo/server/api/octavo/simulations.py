"""``POST /octavo/simulate``, which simulates a server under load for the page's simulator.

It takes seconds of one processor, so a process of its own does it, one at a time: no request waits
for it.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from octavo.cost.find_device import AUTO
from octavo.server.api.fields import Body, Object
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.body import JsonRoute
from octavo.server.http.bounded_subprocess import BoundedSubprocess
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError
from octavo.server.http.sse import run_until_disconnect

MAX_SECONDS = 60.0
_MAX_CHARS = 200


class SimulationRequest(Body):
    """The model, device and settings to simulate. The load is fixed: see
    octavo.page.serving_runs."""

    model: str | None = Field(
        None, max_length=_MAX_CHARS, description="a name of the catalogue; null: the served model"
    )
    config: Object | None = Field(
        None, description="the contents of the config.json of a model that is called so"
    )
    hardware: str = Field(
        max_length=_MAX_CHARS, description="a device by its name; auto: the engine's device"
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
    """Runs at several rates, as octavo.page.serving_runs returns them."""

    made: dict[str, str]
    settings: dict[str, Any]
    usual_rate: float
    runs: list[dict[str, Any]]


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["planning"])
    simulator = BoundedSubprocess("octavo.page.serving_runs", "a simulation", MAX_SECONDS)

    @router.post("/octavo/simulate", response_model=None, responses=describe(SimulationResponse))
    async def simulate(body: SimulationRequest, request: Request) -> Response:
        """Simulate a server at rates from little load to too much."""
        tenant = request_context(request).tenant.name
        answering = simulator.answer(_question(body, server), tenant)
        text = await run_until_disconnect(request, answering)
        return Response(text, media_type="application/json")

    return router


def _question(body: SimulationRequest, server: ServerContext) -> dict[str, Any]:
    """Return the question for octavo.page.serving_runs.

    Raises:
        HttpError: 400, the model has no name.
        EngineUnavailableError: the engine's device is asked for, and it has not been ready yet.
    """
    question = body.model_dump()
    if body.hardware == AUTO:
        question["device"] = str(server.engine.facts.runs_as.get("device", "cpu"))
    if body.model is not None:
        return question
    if body.config is not None or server.model_path is None:
        raise HttpError(400, "model: give its name", param="model")
    return {**question, "model": server.model_names[0], "path": str(server.model_path)}
