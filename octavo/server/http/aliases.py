"""`Aliases`, further paths of the same routes, for clients made for another server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

from octavo.server.http.context import ALIAS

App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]

# llama.cpp's server has OpenAI's routes without /v1 too, and its health with it.
ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/v1/health": "/health",
}


class Aliases:
    """An ASGI layer that replaces the path of a request for an alias by the real path.

    It is the outermost layer, so that what the others decide by the path holds for its aliases
    too. A path below one of ``below``, such as ``/models/x``, is replaced likewise.
    """

    def __init__(
        self,
        app: App,
        aliases: Mapping[str, str] = ALIASES,
        below: Collection[str] = ("/chat/completions", "/models", "/responses"),
    ):
        self._app = app
        self._below = {alias.encode() for alias in below}
        self._aliases = {alias.encode(): path.encode() for alias, path in aliases.items()}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self._rename(scope)
        await self._app(scope, receive, send)

    def _rename(self, scope: MutableMapping[str, Any]) -> None:
        """Replace the path if it is an alias byte by byte: an encoded spelling is none."""
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        for alias, path in self._aliases.items():
            is_below = alias in self._below and raw_path.startswith(alias + b"/")
            if raw_path == alias or is_below:
                scope[ALIAS] = scope["path"]
                scope["raw_path"] = path + raw_path[len(alias) :]
                scope["path"] = path.decode() + scope["path"][len(alias) :]
                return
