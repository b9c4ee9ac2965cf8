"""`ModelChoice`, the layer that finds out which model a request is for.

    POST with a model in its body   that model; it is loaded first, and stays until the answer ends
    all others                      the model of ``?model=``, as far as it is loaded

It is inside of `AccessControl`: bodies are bounded, and their clients known.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from octavo.base.errors import DeadlineError, OctavoError
from octavo.server.api.server_context import ServerContext
from octavo.server.http.access_control import App, Message, Receive, Scope, Send
from octavo.server.http.background import in_background
from octavo.server.http.body import LARGE_BODY
from octavo.server.http.context import MODEL_METRICS
from octavo.server.http.errors import HttpError, to_http_error
from octavo.server.http.json_text import parse
from octavo.server.registry.context_of_request import RefusingContext, choose

if TYPE_CHECKING:
    from octavo.server.registry.model_registry import ModelRegistry
    from octavo.server.registry.registered_model import RegisteredModel

# Below these, a POST is for the server, or for a model that it does not serve.
_OF_THE_SERVER = ("/octavo/", "/v1/models/", "/v1/files", "/v1/batches", "/api/pull", "/api/delete")
# The fields that name a model, in the order in which they count; Ollama's older one is the second.
_FIELDS = ("model", "name")


class ModelChoice:
    """An ASGI layer that has the routes of ``app`` work with the model that a request is for.

    What keeps a request from its model, such as an unknown name, is for the route to say.
    """

    def __init__(self, app: App, models: ModelRegistry):
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] != "POST" or scope["path"].startswith(_OF_THE_SERVER):
            choose(self._for_views(scope))
            await self._app(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    def _for_views(self, scope: Scope) -> ServerContext | RefusingContext:
        try:
            return self._models.context_for_views(_model_of_query(scope))
        except HttpError as error:
            return RefusingContext(error)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if body is None:
            return  # its client has left
        again = _Replay(body, receive)
        if not body.strip():
            choose(self._for_views(scope))
            await self._app(scope, again.receive, send)
            return
        try:
            name = await _model_of_body(body)
            model = self._models.named(_model_of_query(scope) if name is None else name)
            context = self._models.acquire_now(model) or await self._wait(model, receive)
        except (HttpError, OctavoError) as error:
            choose(RefusingContext(to_http_error(error)))
            await self._app(scope, again.receive, send)
            return
        if context is None:
            return
        scope[MODEL_METRICS] = context.metrics
        choose(context)
        try:
            await self._app(scope, again.receive, send)
        finally:
            self._models.release(model)

    async def _wait(self, model: RegisteredModel, receive: Receive) -> ServerContext | None:
        """Wait until a model is loaded; return None if its client has left before.

        Raises:
            DeadlineError: it takes longer than requests may.
        """
        most = self._models.commons.settings.request_timeout
        loading = asyncio.ensure_future(self._models.acquire(model))
        leaving = asyncio.ensure_future(receive())
        try:
            done, _ = await asyncio.wait(
                (loading, leaving), timeout=most, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            self._give_up(loading, model)
            raise
        finally:
            leaving.cancel()
        if loading.done():
            return loading.result()
        self._give_up(loading, model)
        if not done:
            raise DeadlineError(f"the timeout of {most:g} s passed while {model.name} was loading")
        return None

    def _give_up(self, loading: asyncio.Future[ServerContext], model: RegisteredModel) -> None:
        """Have a request that waits, or has just got its model, not need it any more."""
        if not loading.cancel() and loading.exception() is None:
            self._models.release(model)


async def _read(receive: Receive) -> bytes | None:
    """Return the whole body; None if the client leaves before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class _Replay:
    """Gives a body that has been read to who asks for it next."""

    def __init__(self, body: bytes, receive: Receive):
        self._body: bytes | None = body
        self._receive = receive

    async def receive(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _model_of_body(body: bytes) -> str | None:
    """Return the model that a body names; None if it names none, or not by a text.

    Raises:
        HttpError: 400, it is not JSON.
    """
    if len(body) > LARGE_BODY:
        return await in_background(_name_in, body)
    return _name_in(body)


def _name_in(body: bytes) -> str | None:
    value = parse(body)
    if not isinstance(value, dict):
        return None
    given = [value[field] for field in _FIELDS if value.get(field) is not None]
    return given[0] if given and isinstance(given[0], str) else None


def _model_of_query(scope: Scope) -> str | None:
    query: bytes = scope.get("query_string", b"")
    if b"model=" not in query:
        return None
    return parse_qs(query.decode("latin-1"), encoding="utf-8").get("model", [None])[0]
