"""The routes, and the layers around them, put together.

MeasuredApp ─► Gate ─► FastAPI ─► a router for each kind of API
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo import __version__
from octavo.errors import OctavoError
from octavo.server import chat, completions, metrics, native, openai_models, page, tgi, tokenization
from octavo.server.gate import App, Gate
from octavo.server.http_errors import HttpError, error_response, to_http_error
from octavo.server.metrics import MeasuredApp
from octavo.server.service import Service
from octavo.server.tenants import Tenants

# Where a POST makes the engine work: limits and overload are checked before its body is read.
COSTLY_PATHS = frozenset(
    {"/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions"}
)

_ROUTERS = (chat, completions, openai_models, native, tgi, tokenization, metrics, page)


def create_app(service: Service) -> FastAPI:
    """The routes alone, without the gate before them."""
    app = FastAPI(
        title="octavo",
        version=__version__,
        summary="An OpenAI-compatible server for open-weight language models",
        docs_url=None,  # its pages would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # it would answer with a location made from the Host header
    )
    for module in _ROUTERS:
        app.include_router(module.create_router(service))
    for kind in (HttpError, OctavoError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    return app


def create_server_app(service: Service, tenants: Tenants) -> App:
    """Everything that stands between the socket and the engine."""
    app = create_app(service)
    gate = Gate(
        app,
        service.settings,
        tenants,
        service.engine,
        service.lifecycle,
        service.observer,
        COSTLY_PATHS,
    )
    paths = {*app.openapi()["paths"], "/"}
    measured: Any = MeasuredApp(gate, service.metrics, paths)
    return measured


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(to_http_error(error))
