"""`ServerContext`, the objects that all routes work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request, or answer it from the response cache; raises as `EngineClient.submit`
        does."""
        engine = self.engine if self.response_cache is None else self.response_cache
        return engine.submit(request)

    def check_model(self, name: str | None) -> None:
        """Raise HttpError, 404, if a request names no model or adapter that is served. None is
        any."""
        known = (self.model_argument, *self.model_names)
        if name is None or name in known or ANY_NAME in self.settings.served_model_name:
            return
        if self.loras.find(name) is None:
            adapters = (each.name for each in self.loras.all())
            raise model_not_found(name, (*self.model_names, *adapters))
