"""What the gate knows of a request when it lets it through."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from octavo.server.http.tenants import Tenant

# True in the ASGI scope of a request whose connection was cut because its client did not read.
SLOW_READER = "octavo.slow_reader"
# What drops a request's connection at once, with all that waits to be sent.
ABORT = "octavo.abort"
# What says how many bytes its client has taken, of all that was written to the connection.
TAKEN = "octavo.taken"


# Names of fields come from clients: what goes into logs and headers of them is short and plain.
_MAX_IGNORED = 32
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class IgnoredFields:
    """The fields of one request's body that have no effect here, by name.

    Args:
        strict: whether such fields are refused instead.
    """

    def __init__(self, *, strict: bool = False):
        self.strict = strict
        self._names: dict[str, None] = {}  # in their order, each once

    def add(self, name: str) -> None:
        """Note one. Names that are odd, or too many, are noted as "..." together."""
        is_plain = len(self._names) < _MAX_IGNORED and _NAME.fullmatch(name)
        self._names[name if is_plain else "..."] = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Lies in the ASGI scope, under ``"octavo"``.

    Args:
        external_id: ``x-request-id``, the client's or ours; safe for logs and headers.
        tenant: on whose account the request runs.
        arrival_time: ``time.monotonic()`` when its header had been read.
        ignored: what its body asks for in vain; the gate tells the client and the operator.
    """

    external_id: str
    tenant: Tenant
    arrival_time: float
    ignored: IgnoredFields = field(default_factory=IgnoredFields)


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
