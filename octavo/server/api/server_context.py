"""`ServerContext`, the objects that all routes work with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo.server.api.prompts import PromptRenderer
from octavo.server.engine.generation import (
    EngineClient,
    EngineObserver,
    Generation,
    GenerationRequest,
)
from octavo.server.engine.response_cache import ResponseCache
from octavo.server.engine.served_loras import ServedLoras
from octavo.server.http.access_control import DrainState
from octavo.server.http.errors import model_not_found
from octavo.server.settings import ServerSettings
from octavo.server.watch.metrics import Metrics
from octavo.server.watch.step_stream import StepStream

if TYPE_CHECKING:
    from octavo.server.engine.replicas import ReplicaSet

ANY_NAME = "*"  # as a served model's name: clients may use any


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One of several models of a server, as it is now.

    Args:
        names: that clients may use; the first is in answers.
        path: of its files, which clients must not learn.
        state: "unloaded", "loading", "loaded", "restarting" (its engine has died) or "unloading".
        is_pinned: it is not unloaded to make room, nor when it is idle.
        num_requests, num_waiting: that it has, and that wait for it to be loaded.
        memory_bytes: weights, KV, activations: what it takes, or would; None until it is known.
        max_model_len: tokens of its context, while it is loaded.
        failure: why it could not be loaded the last time, if so.
        unload_after: seconds until it is unloaded, without a further request; None is never.
    """

    names: tuple[str, ...]
    path: Path
    state: str
    is_pinned: bool
    num_requests: int
    num_waiting: int
    memory_bytes: Mapping[str, int] | None
    max_model_len: int | None
    failure: str | None
    unload_after: float | None


class ModelDirectory(Protocol):
    """The models of a server that has several, as routes see them."""

    @property
    def budget_bytes(self) -> int:
        """Memory that all loaded models may take together."""
        ...

    def list(self) -> Sequence[ModelStatus]:
        """Return all models, in the order in which they were named."""
        ...

    def status_of(self, name: str) -> ModelStatus:
        """Return a model by one of its names; HttpError, 404, if there is none."""
        ...

    def context_of(self, name: str) -> ServerContext | None:
        """Return what routes work with of a loaded model; None of one that is not loaded.

        Raises:
            HttpError: 404, there is no such model.
        """
        ...

    def use(self, name: str | None) -> AbstractAsyncContextManager[ServerContext]:
        """Load a model, unless it is loaded, and keep it within the block.

        Args:
            name: one of its names; None is the first model that was named.

        Raises:
            HttpError: 404, there is no such model; 500 or 503, it cannot be loaded.
        """
        ...

    def load(self, name: str, *, pin: bool | None = None) -> None:
        """Begin to load a model; HttpError, 404 or 400, if there is none or it is loaded."""
        ...

    def unload(self, name: str) -> None:
        """Unload a model when its requests are over; HttpError, 404 or 400, if it is not loaded."""
        ...

    def keep(self, name: str, seconds: float) -> None:
        """Set for how long a model stays without a request; below 0 is until there is no
        room for another one, 0 is not at all. It holds until it is set anew, or unloaded."""
        ...

    async def rescan(self) -> None:
        """Look again for models in the folder that has them."""
        ...


@dataclass(frozen=True)
class ServerContext:
    """One served model, and everything else that routes need."""

    settings: ServerSettings
    engine: EngineClient
    prompts: PromptRenderer
    metrics: Metrics
    drain_state: DrainState
    model_names: tuple[str, ...]  # names that clients may use; answers have the first
    created: int  # Unix time of the server's start
    observer: EngineObserver = field(default_factory=EngineObserver)
    steps: StepStream = field(default_factory=StepStream)
    model_argument: str | None = None  # of the command line: a valid name, but never shown
    model_path: Path | None = None  # folder of its files, never shown either
    response_cache: ResponseCache | None = None
    replicas: ReplicaSet | None = None  # the engine, where it is several
    loras: ServedLoras = field(default_factory=lambda: ServedLoras(None, ()))
    models: ModelDirectory | None = None  # all of them, where there may be several

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request, or answer it from the response cache; raises as `EngineClient.submit`
        does."""
        engine = self.engine if self.response_cache is None else self.response_cache
        return engine.submit(request)

    def check_model(self, name: str | None) -> None:
        """Raise HttpError, 404, if a request names no model or adapter that is served. None is
        any."""
        if name is None or self.serves(name) or ANY_NAME in self.settings.served_model_name:
            return
        adapters = (each.name for each in self.loras.all())
        raise model_not_found(name, (*self.model_names, *adapters))

    def serves(self, name: str) -> bool:
        """Return whether a name is one of this model's, or of an adapter."""
        known = (self.model_argument, *self.model_names)
        return name in known or self.loras.find(name) is not None
