"""The context of a request, with the facts about it that `AccessControl` has found out."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from octavo.server.http.tenants import Tenant

# Keys of the ASGI scope. True if the connection was cut because its client did not read.
SLOW_READER = "octavo.slow_reader"
# Why a constraint on the answer was refused while the body was read: a reason of `ConstraintError`.
REFUSED_CONSTRAINT = "octavo.refused_constraint"
# A function that drops the connection at once, with all that waits to be sent.
ABORT = "octavo.abort"
# The metrics of the model that the request is for, on a server with several.
MODEL_METRICS = "octavo.model_metrics"
# The path that a client has asked for, where it is another one's alias.
ALIAS = "octavo.alias"
# A function that returns how many bytes the client has taken of those written to it.
TAKEN = "octavo.taken"


# Names of fields come from clients: only short and plain ones go into logs and headers.
_MAX_IGNORED = 32
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class IgnoredFields:
    """Names of the fields of one request's body that have no effect here.

    Args:
        strict: whether such fields are refused instead.
    """

    def __init__(self, *, strict: bool = False):
        self.strict = strict
        self._names: dict[str, None] = {}  # in their order, each once

    def add(self, name: str) -> None:
        """Note a name. Odd names, and those beyond a limit, are noted as "..." together."""
        is_plain = len(self._names) < _MAX_IGNORED and _NAME.fullmatch(name)
        self._names[name if is_plain else "..."] = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Facts about a request, in its ASGI scope under ``"octavo"``.

    Args:
        external_id: ``x-request-id``, the client's or the server's; safe for logs and headers.
        tenant: the account that the request is charged to.
        arrival_time: ``time.monotonic()`` when its header had been read.
        ignored: fields of its body without effect; `AccessControl` reports them in a header and
            to the observer.
    """

    external_id: str
    tenant: Tenant
    arrival_time: float
    ignored: IgnoredFields = field(default_factory=IgnoredFields)


def create_request_id() -> str:
    """Return a new id, for requests that do not bring their own."""
    return f"req-{secrets.token_hex(12)}"


def request_context(request: HTTPConnection) -> RequestContext:
    """Return the context of a request that has passed `AccessControl`.

    Raises:
        KeyError: it has not. No route may answer then, so there is no default.
    """
    context: RequestContext = request.scope["octavo"]
    return context
