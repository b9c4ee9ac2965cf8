"""`RegisteredModel`, one of several models, and `LoadOrder`, which says that it is wanted."""

from __future__ import annotations

import asyncio
import time
from enum import Enum

from octavo.server.api.server_context import ModelStatus, ServerContext
from octavo.server.engine.generation import EngineState
from octavo.server.http.errors import HttpError
from octavo.server.registry.entries import ModelEntry
from octavo.server.registry.eviction import Resident
from octavo.server.registry.memory_need import MemoryNeed, PlannedModel
from octavo.server.served_model import ServedModel

# For so long, all requests for a model that could not be loaded get the same error.
FAILURE_SECONDS = 10.0


class ModelState(Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class RegisteredModel:
    """A model, in memory or not. `ModelRegistry` changes it.

    ``is_leaving``: new requests wait until it has been unloaded and loaded again. ``must_end``: it
    is unloaded as soon as its requests are over, since an operator or its idle time says so.
    """

    def __init__(self, entry: ModelEntry, idle_seconds: float | None):
        self.entry = entry
        self.is_pinned = entry.is_pinned
        self.state = ModelState.UNLOADED
        self.planned: PlannedModel | None = None
        self.need: MemoryNeed | None = None  # as planned, or as the engine has said
        self.watching: asyncio.Task[None] | None = None
        self.served: ServedModel | None = None
        self.context: ServerContext | None = None
        self.num_requests = 0
        self.last_used = 0.0
        self.is_leaving = self.must_end = False
        self.failure: HttpError | None = None
        self._failed_at = 0.0
        self._usual_idle_seconds = idle_seconds
        self.idle_seconds = idle_seconds  # None: it stays

    @property
    def name(self) -> str:
        return self.entry.names[0]

    def serves(self, name: str) -> bool:
        """Return whether a name is one of this model's; while it is loaded, also what its context
        says is."""
        return self.entry.serves(name) or (self.context is not None and self.context.serves(name))

    @property
    def is_available(self) -> bool:
        """Whether a request can begin at once."""
        return self.state is ModelState.LOADED and not (self.is_leaving or self.must_end)

    @property
    def is_in_memory(self) -> bool:
        return self.state is not ModelState.UNLOADED

    @property
    def need_bytes(self) -> int:
        return 0 if self.need is None else self.need.total

    @property
    def works_alone(self) -> bool:
        """Whether its engine has work that no request of a client waits for any more."""
        is_at_work = self.served is not None and self.served.engine.num_unfinished > 0
        return is_at_work and not self.num_requests and self.state is ModelState.LOADED

    @property
    def is_busy(self) -> bool:
        return self.num_requests > 0 or self.works_alone

    def as_resident(self) -> Resident:
        is_busy = self.is_busy or self.state is ModelState.LOADING
        return Resident(self.name, self.need_bytes, self.last_used, self.is_pinned, is_busy)

    def fail(self, failure: HttpError) -> None:
        """Note why it could not be loaded."""
        self.failure, self._failed_at = failure, time.monotonic()

    def check_failure(self) -> None:
        """Raise the error of the last attempt to load it, if that was a moment ago."""
        if self.failure is not None and time.monotonic() - self._failed_at < FAILURE_SECONDS:
            raise self.failure

    def forget(self) -> None:
        """Note that it is not in memory any more."""
        self.state = ModelState.UNLOADED
        self.served = self.context = self.watching = None
        self.is_leaving = self.must_end = False
        self.idle_seconds = self._usual_idle_seconds

    @property
    def idle_since(self) -> float | None:
        """The time of its last request; None while it has requests, or is not loaded."""
        is_idle = self.state is ModelState.LOADED and not self.is_busy
        return self.last_used if is_idle else None

    @property
    def unload_after(self) -> float | None:
        """Seconds until it is unloaded for being idle; None is never, or not yet."""
        if self.idle_seconds is None or self.is_pinned or self.idle_since is None:
            return None
        return max(0.0, self.idle_since + self.idle_seconds - time.monotonic())

    def status(self, num_waiting: int) -> ModelStatus:
        state = self.state.value
        if self.state is ModelState.LOADED and self.must_end:
            state = ModelState.UNLOADING.value
        elif self.served is not None and self.served.engine.state is EngineState.RESTARTING:
            state = EngineState.RESTARTING.value
        length = None
        if self.context is not None and self.state is ModelState.LOADED:
            length = self.context.engine.facts.max_model_len
        return ModelStatus(
            names=self.entry.names,
            path=self.entry.path,
            state=state,
            is_pinned=self.is_pinned,
            num_requests=self.num_requests,
            num_waiting=num_waiting,
            memory_bytes=None if self.need is None else self.need.as_json(),
            max_model_len=length,
            failure=None if self.failure is None else self.failure.message,
            unload_after=self.unload_after,
        )


class LoadOrder:
    """A model that is to be loaded, for requests that wait, or because an operator says so.

    ``done`` is set when it is loaded, and by then ``num_waiting`` requests are counted as its own;
    or to the error that kept it from being loaded.
    """

    def __init__(self, model: RegisteredModel):
        self.model = model
        self.num_waiting = 0
        self.is_asked_for = False  # by an operator: it stays when no request waits
        self.is_planned = False  # what it needs is being found out
        self.is_begun = False  # it is being loaded
        self.is_granted = False
        self.cause: Exception | None = None  # what kept it from being loaded
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(_take_notice)

    @property
    def is_wanted(self) -> bool:
        return self.is_asked_for or self.num_waiting > 0

    def grant(self) -> None:
        """Note that the model is loaded."""
        self.is_granted = True
        self.model.num_requests += self.num_waiting
        self.done.set_result(None)

    def refuse(self, failure: HttpError, cause: Exception) -> None:
        """Note why it is not loaded: ``failure`` for clients, its ``cause`` for the operator."""
        if not self.done.done():
            self.cause = cause
            self.done.set_exception(failure)


def _take_notice(done: asyncio.Future[None]) -> None:
    """Look at an error, for which no request may wait any more."""
    if not done.cancelled():
        done.exception()
