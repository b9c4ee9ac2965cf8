"""`ContextOfRequest`, which stands for the `ServerContext` of the model that a request is for.

Routes are made once, for all models, with one object in place of a `ServerContext`. What it is
for the request that is being answered, `ModelChoice` says before the route runs, in a context
variable: it holds in the tasks and threads that the request starts, and in no others.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.server.api.server_context import ModelDirectory, ServerContext
from octavo.server.http.errors import HttpError

if TYPE_CHECKING:
    from octavo.server.http.access_control import DrainState
    from octavo.server.settings import ServerSettings
    from octavo.server.watch.metrics import ServerMetrics

_chosen: ContextVar[ServerContext | RefusingContext] = ContextVar("octavo_model")


class RefusingContext:
    """An error in place of a model that a request cannot have.

    It is raised where a route asks for the model, so that the route answers in its own shape.
    """

    def __init__(self, error: HttpError):
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error


class ContextOfRequest:
    """The things that all requests have in common; all others are those of the model of the
    request that is being answered.

    Raises:
        LookupError: no request is being answered, for anything of a model.
    """

    replicas = None  # each model has one engine

    def __init__(
        self,
        settings: ServerSettings,
        drain_state: DrainState,
        created: int,
        metrics: ServerMetrics,
        models: ModelDirectory,
    ):
        self.settings = settings
        self.drain_state = drain_state
        self.created = created
        self.metrics = metrics
        self.models = models

    def __getattr__(self, name: str) -> Any:
        return getattr(_chosen.get(), name)


def choose(context: ServerContext | RefusingContext) -> None:
    """Say which model the request of this task is for."""
    _chosen.set(context)
