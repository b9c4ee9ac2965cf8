"""`ErrorDialects`, the form that errors have by the path that a client has asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from octavo.server.http.context import ALIAS
from octavo.server.http.errors import HttpError, error_response

# Makes the answer of an error, given the id of the request.
WriteError = Callable[[HttpError, str], Response]


class ErrorDialects:
    """Answers errors in the form of the API that a path belongs to; by default in OpenAI's.

    Args:
        by_prefix: what writes the errors of paths that begin so.
    """

    def __init__(self, by_prefix: Mapping[str, WriteError] | None = None):
        self._by_prefix = dict(by_prefix or {})

    def response(self, error: HttpError, scope: Mapping[str, Any], request_id: str) -> Response:
        """Return the answer to a request that has failed, by its ASGI scope."""
        path: str = scope.get(ALIAS) or scope["path"]
        for prefix, write in self._by_prefix.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                return write(error, request_id)
        return error_response(error)
