"""Routes for operators, such as health, version and load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

from fastapi import APIRouter
from pydantic import BaseModel, create_model
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.core.stats import StepStats
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import EngineClient, EngineState

_METHODS = ["GET", "HEAD"]


class Status(BaseModel):
    """``models``: the state of each, where there are several."""

    status: str
    models: dict[str, str] | None = None


class Version(BaseModel):
    version: str


def load_of(engine: EngineClient) -> dict[str, Any]:
    """Return the engine's load: the statistics of its last step, and a few more figures."""
    stats = engine.stats
    return {
        "server_load": stats.num_running + stats.num_waiting,
        "kv_usage": stats.kv_utilisation,
        **stats.as_json(),
        "num_restarts": engine.num_restarts,
    }


_FIGURES: Any = {name: (kind, ...) for name, kind in get_type_hints(StepStats).items()}

Load = create_model(
    "Load",
    __doc__="``server_load`` is vLLM's: requests, counted by sample, that wait or run.",
    server_load=(int, ...),
    kv_usage=(float, ...),
    num_restarts=(int, ...),
    **_FIGURES,
)


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(tags=["operation"])
    unavailable: Any = {503: {"model": Status}}

    async def health() -> JSONResponse:
        """Return 200 if the engine is ready. Where there are several models, the server is, and
        says what each of them is."""
        if server.models is not None:
            states = {model.names[0]: model.state for model in server.models.list()}
            return JSONResponse({"status": "ok", "models": states})
        engine = server.engine
        if engine.state is EngineState.READY:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": engine.state.value}, 503)

    async def ready() -> JSONResponse:
        """Return 200 if new requests are accepted."""
        if server.drain_state.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return await health()

    async def version() -> JSONResponse:
        """Return the version of octavo."""
        return JSONResponse({"version": __version__})

    async def load() -> JSONResponse:
        """Return the engine's load at this moment."""
        return JSONResponse(load_of(server.engine))

    def add(path: str, answer: Callable[[], Awaitable[JSONResponse]], **documented: Any) -> None:
        # The first route answers, and lists all its methods if another one is used. The second is
        # for OpenAPI, in which a route has one method.
        router.add_api_route(path, answer, methods=_METHODS, include_in_schema=False)
        router.add_api_route(path, answer, methods=["GET"], **documented)

    add("/health", health, response_model=Status, responses=unavailable)
    add("/ready", ready, response_model=Status, responses=unavailable)
    add("/ping", health, response_model=Status, responses=unavailable)
    add("/version", version, response_model=Version)
    add("/load", load, response_model=Load)
    return router
