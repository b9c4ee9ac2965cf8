"""`MeasuredApp`, which counts and times HTTP requests from outside of everything else."""

from __future__ import annotations

import time
from collections.abc import Container

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.http.context import MODEL_METRICS, SLOW_READER
from octavo.server.watch.metrics import ServerMetrics

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
CLIENT_LEFT = 499  # status in metrics if the client left before it was answered


class MeasuredApp:
    """An ASGI layer that counts HTTP requests, their times, and how their clients leave.

    Only `Aliases` is outside of it. Inner layers mark a client that was cut with `SLOW_READER`, and
    the model that a request was for with `MODEL_METRICS`.

    Args:
        metrics: of requests that are for no model in particular.
        paths: paths of the app, under which requests count that an inner layer refused before
            routing. All other paths count as "other".
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Container[str] = ()):
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT
        is_whole = has_left = False
        started = time.perf_counter()

        async def watched_send(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_whole = True

        async def watched_receive() -> Message:
            nonlocal has_left
            message = await receive()
            if message["type"] == "http.disconnect" and not is_whole:
                has_left = True
            return message

        try:
            await self._app(scope, watched_receive, watched_send)
        except Exception:
            status = 500 if status == CLIENT_LEFT else status  # what uvicorn will answer
            raise
        finally:
            metrics = scope.get(MODEL_METRICS, self._metrics)
            if scope.get(SLOW_READER):
                metrics.on_slow_reader()
            elif has_left:
                metrics.on_disconnect()
            metrics.on_http_response(
                self._route_of(scope),
                scope["method"] if scope["method"] in METHODS else "other",
                status,
                time.perf_counter() - started,
            )

    def _route_of(self, scope: Scope) -> str:
        route = scope.get("route")  # set by FastAPI's router
        if route is not None:
            return str(route.path)
        return scope["path"] if scope["path"] in self._paths else "other"
