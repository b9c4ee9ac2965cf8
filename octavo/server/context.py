"""What the gate knows of a request when it lets it through."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from octavo.server.tenants import Tenant

# True in the ASGI scope of a request whose connection was cut because its client did not read.
SLOW_READER = "octavo.slow_reader"
# What drops a request's connection at once, with all that waits to be sent.
ABORT = "octavo.abort"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Lies in the ASGI scope, under ``"octavo"``.

    Args:
        external_id: ``x-request-id``, the client's or ours; safe for logs and headers.
        tenant: on whose account the request runs.
        arrival_time: ``time.monotonic()`` when its header had been read.
    """

    external_id: str
    tenant: Tenant
    arrival_time: float


def create_request_id() -> str:
    """A new one, for requests that do not bring their own."""
    return f"req-{secrets.token_hex(12)}"


def request_context(request: HTTPConnection) -> RequestContext:
    """The context of a request that came through the gate.

    Raises:
        KeyError: it did not. No route may answer then, so there is no default.
    """
    context: RequestContext = request.scope["octavo"]
    return context
