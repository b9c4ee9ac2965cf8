"""The ASGI app with all routes, and the layers around them.

Aliases ─► MeasuredApp ─► AccessControl ─► FastAPI ─► a router for each kind of API

Where a server has several models, the layer that chooses one is between the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from octavo import __version__
from octavo.base.errors import OctavoError
from octavo.server.api import lora_adapters
from octavo.server.api.anthropic import routes as anthropic
from octavo.server.api.anthropic.answers import messages_error_response
from octavo.server.api.llama_server import routes as llama_server
from octavo.server.api.llama_server.errors import llama_error_response
from octavo.server.api.octavo import (
    deployment,
    generate,
    metrics,
    operation,
    simulations,
    specs,
    steps,
    tensors,
    tokenization,
)
from octavo.server.api.ollama import routes as ollama
from octavo.server.api.ollama.answers import ollama_error_response
from octavo.server.api.openai import chat_completions, completions, models
from octavo.server.api.openai.responses import routes as responses
from octavo.server.api.pooling import others as other_embeddings
from octavo.server.api.pooling import reranking
from octavo.server.api.pooling import routes as pooling
from octavo.server.api.server_context import ServerContext
from octavo.server.api.tgi import routes as tgi
from octavo.server.engine.generation import EngineObserver
from octavo.server.http.access_control import OPERATOR_PATHS, AccessControl, App, Capacity
from octavo.server.http.aliases import Aliases
from octavo.server.http.background import in_background
from octavo.server.http.context import request_context
from octavo.server.http.error_dialects import ErrorDialects
from octavo.server.http.errors import HttpError, to_http_error
from octavo.server.http.json_text import encode
from octavo.server.http.request_metrics import MeasuredApp
from octavo.server.http.tenants import Tenants
from octavo.server.page import routes as page
from octavo.server.watch.metrics import ServerMetrics

_ROUTE_MODULES = (
    chat_completions,
    completions,
    responses,
    anthropic,
    ollama,
    models,
    lora_adapters,
    generate,
    operation,
    tgi,
    llama_server,
    tokenization,
    pooling,
    reranking,
    other_embeddings,
    specs,
    deployment,
    tensors,
    simulations,
    metrics,
    steps,
    page,
)


# Errors before a route is found; its own ones it writes itself.
ERRORS = ErrorDialects(
    {
        anthropic.PATH: messages_error_response,
        ollama.PREFIX: ollama_error_response,
        # OpenAI's routes, as clients of llama.cpp's server know them.
        "/chat/completions": llama_error_response,
        "/completions": llama_error_response,
    }
)


def create_routers(server: ServerContext) -> list[APIRouter]:
    """Return all routes, a router for each kind of API."""
    routers = [module.create_router(server) for module in _ROUTE_MODULES]
    routers.append(other_embeddings.create_ollama_router(server))
    if server.replicas is not None:
        from octavo.server.api.octavo import replicas

        routers.append(replicas.create_router(server.replicas))
    if server.models is not None:
        from octavo.server.api.llama_server import models as router_models

        routers.append(router_models.create_router(server.models))
    return routers


def create_app(routers: Sequence[APIRouter]) -> FastAPI:
    """Return the FastAPI app with the routes, without the layers around it."""
    app = FastAPI(
        title="octavo",
        version=__version__,
        summary="An OpenAI-compatible server for open-weight language models",
        openapi_url=None,  # see below
        docs_url=None,  # its pages would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # it would answer with a location made from the Host header
    )
    for router in routers:
        app.include_router(router)
    routes = _routes(routers)

    async def answer_error(request: Request, error: Exception) -> Response:
        http_error = to_http_error(error)
        if http_error.status == 405:  # the router knows of the first route of a path alone
            methods = ", ".join(sorted(_methods_of(request, routes)))
            http_error.headers = {"Allow": methods} if methods else http_error.headers
        request_id = request_context(request).external_id
        return ERRORS.response(http_error, request.scope, request_id)

    for kind in (HttpError, OctavoError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer_error)

    async def describe(request: Request) -> Response:
        # Made on request and in the background: it takes a third of a second, for which neither
        # streams nor the start should wait.
        document = await in_background(lambda: encode(app.openapi()))
        return Response(document, media_type="application/json")

    app.add_route("/openapi.json", describe, include_in_schema=False)
    return app


@dataclass(frozen=True)
class Entrance:
    """The layers that requests meet before they reach a model.

    Args:
        capacity: asked whether another request can be queued.
        observer, metrics: of what is refused there, and of HTTP.
        choose_model: the layer that finds out which model a request is for.
    """

    capacity: Capacity
    observer: EngineObserver
    metrics: ServerMetrics
    choose_model: Callable[[App], App] = lambda app: app

    @classmethod
    def of(cls, server: ServerContext) -> Entrance:
        """Return that of a server with one model."""
        return cls(server.engine, server.observer, server.metrics)


def create_server_app(
    server: ServerContext, tenants: Tenants, entrance: Entrance | None = None
) -> App:
    """Return the whole app, with all layers between the socket and the engine."""
    entrance = entrance or Entrance.of(server)
    routers = create_routers(server)
    app = create_app(routers)
    access = AccessControl(
        entrance.choose_model(app),
        server.settings,
        tenants,
        entrance.capacity,
        server.drain_state,
        entrance.observer,
        # Limits and overload are checked before a body is read: wherever a POST brings one. What
        # an operator may do about overload is no part of it.
        costly_paths=frozenset(post_routes(routers)) - OPERATOR_PATHS,
        errors=ERRORS,
    )
    paths = described_paths(routers) | {"/", steps.PATH}
    measured: Any = MeasuredApp(access, entrance.metrics, paths)
    return Aliases(measured)


def described_paths(routers: Sequence[APIRouter]) -> set[str]:
    """Return the paths that are described in /openapi.json."""
    return {route.path_format for route in _routes(routers) if route.include_in_schema}


def post_routes(routers: Sequence[APIRouter]) -> dict[str, APIRoute]:
    """Return the routes that take a body, by their path."""
    routes = [route for route in _routes(routers) if route.body_field is not None]
    return {route.path: route for route in routes if "POST" in (route.methods or ())}


def _routes(routers: Sequence[APIRouter]) -> list[APIRoute]:
    routes = [route for router in routers for route in router.routes]
    return [route for route in routes if isinstance(route, APIRoute)]


def _methods_of(request: Request, routes: Sequence[APIRoute]) -> set[str]:
    """Return the methods of all routes that have the path of the first one that fits a request."""
    fitting = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    first = next(fitting, None)
    alike = [route for route in routes if first is not None and route.path == first.path]
    return {method for route in alike for method in route.methods or ()}
