"""What the routes are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.server.generation import EngineClient, Observer
from octavo.server.http_errors import model_not_found
from octavo.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.server.metrics import Metrics
    from octavo.server.prompts import PromptRenderer


@dataclass(slots=True)
class Lifecycle:
    """Whether the server is on its way out. Set once, on SIGTERM."""

    is_draining: bool = False


@dataclass(frozen=True)
class Service:
    """One served model, and everything that its routes need."""

    settings: ServerSettings
    engine: EngineClient
    prompts: PromptRenderer
    metrics: Metrics
    lifecycle: Lifecycle
    model_names: tuple[str, ...]  # what clients may call it; answers say the first
    created: int  # Unix time of the server's start
    observer: Observer = field(default_factory=Observer)

    def check_model(self, name: str | None) -> None:
        """Raise HttpError, 404, if a request names a model that is not served. None is any."""
        if name is not None and name not in self.model_names:
            raise model_not_found(name)
