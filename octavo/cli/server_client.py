"""`ServerClient`, which commands ask a running server by: JSON, and streams of events."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

from octavo.base.errors import OctavoError
from octavo.cli import UsageError
from octavo.system.child_process import KEY_VARIABLE

_MAX_BYTES = 16 << 20  # of an answer, or of one event


class ServerError(OctavoError):
    """A server cannot be reached, or has answered with an error."""


class ServerClient:
    """A client of one server.

    Args:
        url: ``http://HOST:PORT``; what follows, such as ``/v1``, is left out.
        key: that it may ask for; by default that of the environment.
        timeout: seconds without a byte of an answer.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url {url}: write it like http://127.0.0.1:8000")
        try:
            self._place = parts.hostname, parts.port
        except ValueError:
            raise UsageError(f"--url {url}: that is no port") from None
        self._is_https = parts.scheme == "https"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self._key = os.environ.get(KEY_VARIABLE) if key is None else key
        self._timeout = timeout

    def get(self, path: str) -> Any:
        """Return the JSON at a path. Raises ServerError."""
        return self._read(*self._send("GET", path))

    def events(self, path: str, body: Any) -> Generator[dict[str, Any], None, None]:
        """Yield the objects of a stream, to its end. Closing the iterator ends the request.

        Raises:
            ServerError: the server refuses it, or the stream breaks off.
        """
        connection, response = self._send("POST", path, {**body, "stream": True})
        try:
            while line := response.readline(_MAX_BYTES):
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(_message_of(event, 200))
                yield event
            raise ServerError(f"{self.url} ended the answer before its end")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"{self.url}: the answer broke off: {error}") from None
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: Any = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(*self._place, timeout=self._timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, content, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"{self.url} cannot be reached: {error}") from None
        if response.status >= 300:
            said = response.read(_MAX_BYTES)
            connection.close()
            raise ServerError(_message_of(_as_json(said), response.status))
        return connection, response

    def _read(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> Any:
        try:
            found = _as_json(response.read(_MAX_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: the answer broke off: {error}") from None
        finally:
            connection.close()
        if found is None:
            raise ServerError(f"{self.url} does not answer with JSON: is it an octavo server?")
        return found


def _as_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _message_of(said: Any, status: int) -> str:
    """Return the message of an error, in words."""
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    hint = f": set {KEY_VARIABLE}" if status == 401 else ""
    return (
        f"the server answers {status}: {message}{hint}"
        if message
        else (f"the server answers with status {status}{hint}")
    )
