"""`ModelRegistry`, the models of a server that has several.

    request ─► acquire ─► loaded: it begins
                       └► a load order, in a queue ─► room: an engine starts ─► it begins
                                                   └► no room: models without requests are unloaded,
                                                      the least recently used first

Orders are served as they come. Where only models with requests could make room, these get no new
ones until their requests are over, so that a model that is asked for all the time cannot keep
another one waiting for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    OctavoError,
    QueueFullError,
)
from octavo.server.api.server_context import ModelStatus, ServerContext
from octavo.server.engine.process import ProcessLauncher
from octavo.server.http.errors import HttpError, model_not_found, to_http_error
from octavo.server.log_lines import log_event
from octavo.server.registry.context_of_request import choose
from octavo.server.registry.entries import ModelEntry
from octavo.server.registry.eviction import models_to_unload
from octavo.server.registry.memory_need import GIB, PlannedModel
from octavo.server.registry.registered_model import LoadOrder, ModelState, RegisteredModel
from octavo.server.served_model import (
    ModelIdentity,
    ServedModel,
    ServerCommons,
    describe_engine,
    log_choices,
)
from octavo.settings.engine import EngineArgs

_log = logging.getLogger("octavo.server")

_LOOK_SECONDS = 0.1  # between two looks at models that work on what no request waits for

CreateLauncher = Callable[[EngineArgs], ProcessLauncher]
FindCalibration = Callable[[str], Any]


@dataclass(frozen=True)
class RegistrySettings:
    """Settings of a registry.

    Args:
        budget_bytes: that all loaded models may take together.
        max_waiting: requests that wait for models to be loaded.
        idle_seconds: after which a model without requests is unloaded; None is never.
        plan: returns what a model needs, and its engine's arguments; it runs in a thread, and
            raises ConfigError or ModelError.
        create_launcher: makes the launcher of an engine.
        find_entries: returns the models that there are by now, for a folder that changes.
        find_calibration: of a model, by its argument.
    """

    budget_bytes: int
    max_waiting: int
    idle_seconds: float | None
    plan: Callable[[ModelEntry], PlannedModel]
    create_launcher: CreateLauncher
    find_entries: Callable[[], Sequence[ModelEntry]]
    find_calibration: FindCalibration = lambda name: None


class ModelRegistry:
    """Loads and unloads models. Belongs to one event loop; see
    `octavo.server.api.server_context.ModelDirectory`, which it is."""

    def __init__(
        self,
        entries: Iterable[ModelEntry],
        settings: RegistrySettings,
        create_commons: Callable[[ModelRegistry], ServerCommons],
    ):
        self._settings = settings
        self._commons = create_commons(self)
        self._models = [RegisteredModel(entry, settings.idle_seconds) for entry in entries]
        self._default = self._models[0] if self._models[0].entry.loads_at_start else None
        self._orders: list[LoadOrder] = []
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._ticks = itertools.count(1)  # breaks ties of time.monotonic()

    @property
    def commons(self) -> ServerCommons:
        """The objects that all models share."""
        return self._commons

    # -- ModelDirectory ----------------------------------------------------------------------

    @property
    def budget_bytes(self) -> int:
        return self._settings.budget_bytes

    def list(self) -> Sequence[ModelStatus]:
        waiting = {order.model.name: order.num_waiting for order in self._orders}
        return [model.status(waiting.get(model.name, 0)) for model in self._models]

    def status_of(self, name: str) -> ModelStatus:
        model = self._find(name)
        order = self._order_of(model)
        return model.status(0 if order is None else order.num_waiting)

    def context_of(self, name: str) -> ServerContext | None:
        model = self._find(name)
        return model.context if model.state is ModelState.LOADED else None

    def load(self, name: str, *, pin: bool | None = None) -> None:
        self._check_open()
        model = self._find(name)
        if pin is not None:
            model.is_pinned = pin
            self._changed.set()
        if model.is_available or model.state is ModelState.LOADING:
            if pin is None:
                raise HttpError(400, f"The model {model.name!r} is loaded already.", param="model")
            return
        model.failure = None
        self._order(model).is_asked_for = True

    def unload(self, name: str) -> None:
        model = self._find(name)
        if model.state is not ModelState.LOADED:
            raise HttpError(
                400, f"The model {model.name!r} is {model.state.value}, not loaded.", param="model"
            )
        self._end_soon(model)

    def keep(self, name: str, seconds: float) -> None:
        model = self._find(name)
        model.idle_seconds = None if seconds < 0 else seconds
        self._changed.set()

    async def rescan(self) -> None:
        found = await asyncio.to_thread(self._settings.find_entries)
        known = {model.name for model in self._models}
        here = {entry.names[0] for entry in found}
        self._models = [m for m in self._models if m.name in here or m.is_in_memory] + [
            RegisteredModel(entry, self._settings.idle_seconds)
            for entry in found
            if entry.names[0] not in known
        ]

    # -- requests ----------------------------------------------------------------------------

    def named(self, name: str | None) -> RegisteredModel:
        """Return the model of a request; HttpError if there is none of that name, or none that is
        meant by no name."""
        if name is not None:
            return self._find(name)
        if self._default is None:
            names = ", ".join(self._names()[:8])
            raise HttpError(
                400, f"model: is required, since this server has several: {names}", param="model"
            )
        return self._default

    def context_for_views(self, name: str | None) -> ServerContext:
        """Return what a request works with that loads nothing: of the model it names, or else of
        the first, or of the one that was used last.

        Raises:
            HttpError: 404, there is no such model; 503, it is not loaded.
        """
        loaded = [each for each in self._models if each.state is ModelState.LOADED]
        if name is not None:
            model = self._find(name)
        elif self._default in loaded or not loaded:
            model = self._default or self._models[0]
        else:
            model = max(loaded, key=lambda each: each.last_used)
        if model.context is None or model.state is not ModelState.LOADED:
            raise HttpError(
                503,
                f"The model {model.name!r} is {model.state.value}: a request for an answer loads "
                "it, or POST /models/load.",
                code="model_not_loaded",
            )
        return model.context

    def acquire_now(self, model: RegisteredModel) -> ServerContext | None:
        """Return what a request works with, if its model is loaded; it must be released. None
        otherwise."""
        if not model.is_available:
            return None
        model.num_requests += 1
        self._note_use(model)
        return model.context

    async def acquire(self, model: RegisteredModel) -> ServerContext:
        """Return what a request works with as soon as its model is loaded; it must be released.

        Raises:
            QueueFullError: too many requests wait.
            HttpError: 500 or 503, it cannot be loaded.
            EngineUnavailableError: the server is stopping.
        """
        self._check_open()
        if (context := self.acquire_now(model)) is not None:
            return context
        model.check_failure()
        if self.num_waiting >= self._settings.max_waiting:
            raise QueueFullError(
                f"{self._settings.max_waiting} requests wait for models to be loaded", 1.0
            )
        order = self._order(model)
        order.num_waiting += 1
        try:
            await asyncio.shield(order.done)
        except BaseException:
            if order.is_granted:
                self.release(model)
            else:
                order.num_waiting -= 1
                self._changed.set()
            raise
        self._note_use(model)
        assert model.context is not None
        return model.context

    def release(self, model: RegisteredModel) -> None:
        """Note that a request is over."""
        model.num_requests -= 1
        self._note_use(model)
        if not model.num_requests:
            self._changed.set()

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServerContext]:
        model = self.named(name)
        context = await self.acquire(model)
        choose(context)
        try:
            yield context
        finally:
            self.release(model)

    def check_capacity(self, tenant: str = "") -> None:
        """Raise EngineUnavailableError when the server is stopping. Which model a request is for,
        and so whether it can be queued, is not known before its body has been read."""
        self._check_open()

    def _find(self, name: str) -> RegisteredModel:
        for spelling in (name, name.removesuffix(":latest")):  # as Ollama's clients write it
            for model in self._models:
                if model.serves(spelling):
                    return model
        raise model_not_found(name, self._names())

    def _names(self) -> Sequence[str]:
        return [name for model in self._models for name in model.entry.names]

    def _note_use(self, model: RegisteredModel) -> None:
        model.last_used = time.monotonic() + next(self._ticks) * 1e-9

    def _check_open(self) -> None:
        if self._is_stopping:
            raise EngineUnavailableError("the server is stopping", retry_after=1.0)

    # -- orders ------------------------------------------------------------------------------

    def _order_of(self, model: RegisteredModel) -> LoadOrder | None:
        return next((order for order in self._orders if order.model is model), None)

    def _order(self, model: RegisteredModel) -> LoadOrder:
        """Return the order for a model, which is placed now if there is none."""
        order = self._order_of(model)
        if order is None:
            order = LoadOrder(model)
            self._orders.append(order)
            self._changed.set()
        return order

    async def _run(self) -> None:
        """Serve orders and unload idle models, until cancelled."""
        while True:
            self._changed.clear()
            self._advance()
            waits = [s for model in self._models if (s := model.unload_after) is not None]
            if any(model.works_alone for model in self._models):
                waits.append(_LOOK_SECONDS)  # no request tells when that is over
            try:
                async with asyncio.timeout(min(waits) + 1e-3 if waits else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _advance(self) -> None:
        """Do all that can be done now."""
        for model in self._models:
            if model.unload_after == 0.0:
                model.must_end = True
        leaving = self._serve_orders()
        for model in self._models:
            model.is_leaving = model.name in leaving
            is_over = (model.is_leaving or model.must_end) and not model.is_busy
            if is_over and model.state is ModelState.LOADED:
                self._begin_to_unload(model)
        for order in [each for each in self._orders if each.model.is_available]:
            self._grant(order)  # it was to make room for one that is not wanted any more

    def _serve_orders(self) -> Collection[str]:
        """Begin to load what there is room for; return the names of the models that have to go for
        the first order that lacks it."""
        self._orders = [each for each in self._orders if each.is_wanted or each.is_begun]
        for order in list(self._orders):
            model = order.model
            if order.is_begun or order.is_planned or model.is_in_memory:
                continue  # it is being unloaded, perhaps, and loaded again after that
            if model.planned is None:
                order.is_planned = True
                self._begin(self._plan(order))
                continue
            missing = model.need_bytes - (self.budget_bytes - self._used)
            if missing <= 0:
                order.is_begun = True
                model.state = ModelState.LOADING
                self._begin(self._load(order))
                continue
            if any(each.state is ModelState.UNLOADING for each in self._models):
                return self._leaving  # what they free may be enough
            residents = [each.as_resident() for each in self._models if each.is_in_memory]
            chosen = models_to_unload(missing, residents)
            if chosen is not None:
                return {each.name for each in chosen}
            self._refuse(order, self._does_not_fit(model))
        return ()

    @property
    def _used(self) -> int:
        return sum(each.need_bytes for each in self._models if each.is_in_memory)

    @property
    def _leaving(self) -> Collection[str]:
        return [each.name for each in self._models if each.is_leaving]

    def _grant(self, order: LoadOrder) -> None:
        self._orders.remove(order)
        order.grant()

    def _refuse(self, order: LoadOrder, error: Exception) -> None:
        """Tell all who wait for a model, and who ask for it in a moment, why they do not get it."""
        failure = self._as_answer(order.model, error)
        order.model.fail(failure)
        if order in self._orders:
            self._orders.remove(order)
        order.refuse(failure, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the registry of models failed", exc_info=error)
        self._changed.set()

    # -- loading and unloading ---------------------------------------------------------------

    async def _plan(self, order: LoadOrder) -> None:
        """Find out what memory a model needs."""
        try:
            planned = await asyncio.to_thread(self._settings.plan, order.model.entry)
        except OctavoError as error:
            self._refuse(order, error)
        else:
            order.model.planned = planned
            order.model.need = planned.need
        finally:
            order.is_planned = False

    async def _load(self, order: LoadOrder) -> None:
        model, started = order.model, time.monotonic()
        try:
            served, context = await self._start_model(model)
        except Exception as error:
            model.forget()
            self._refuse(order, error)
            return
        model.served, model.context = served, context
        facts = served.engine.facts
        if model.need is not None:
            model.need = model.need.corrected_by(facts)
        model.state, model.failure = ModelState.LOADED, None
        self._note_use(model)
        self._grant(order)
        seconds = time.monotonic() - started
        log_choices(facts)
        log_event(
            "model loaded",
            f"{model.name} is loaded after {seconds:.1f} s ({describe_engine(facts)}): "
            f"{model.need.in_words() if model.need else ''}; "
            f"{self._used / GIB:.2f} of {self.budget_bytes / GIB:.2f} GiB are in use",
            {"model": model.name, "seconds": round(seconds, 3), "memory_bytes": model.need_bytes},
        )
        model.watching = self._begin(self._watch(model, served))
        self._begin(served.predict_steps())

    async def _start_model(self, model: RegisteredModel) -> tuple[ServedModel, ServerContext]:
        """Start the engine of a model, and load its tokenizer meanwhile."""
        assert model.planned is not None
        entry, args = model.entry, model.planned.args
        served = ServedModel(
            ModelIdentity(entry.names, entry.path, entry.argument, log_name=model.name),
            args,
            self._settings.create_launcher(args),
            self._commons,
            chat_template=entry.chat_template,
            find_calibration=lambda: self._settings.find_calibration(args.model),
        )
        served.launch()
        try:
            context = await served.prepare()
            await served.ready()
        except BaseException:
            await served.stop()
            served.metrics.close()
            raise
        served.observe()
        return served, context

    async def _watch(self, model: RegisteredModel, served: ServedModel) -> None:
        """Unload a model whose engine does not start any more: the next request tries again."""
        await served.engine.wait_until_given_up()
        model.fail(self._as_answer(model, EngineError("its engine dies each time it is started")))
        model.watching = None
        self._begin_to_unload(model)

    def _end_soon(self, model: RegisteredModel) -> None:
        """Unload a model when its requests are over, or else after the time for draining."""
        model.must_end = True
        self._changed.set()
        served = model.served

        def end_now() -> None:
            if model.served is served and model.state is ModelState.LOADED and model.must_end:
                self._begin_to_unload(model)

        timeout = self._commons.settings.drain_timeout
        asyncio.get_running_loop().call_later(timeout, end_now)

    def _begin_to_unload(self, model: RegisteredModel) -> None:
        if model.state is ModelState.LOADED:
            model.state = ModelState.UNLOADING
            self._begin(self._unload(model))

    async def _unload(self, model: RegisteredModel) -> None:
        served = model.served
        assert served is not None
        if model.watching is not None:
            model.watching.cancel()
        served.steps.end()
        await served.stop("the model is being unloaded")
        served.metrics.close()
        model.forget()
        log_event("model unloaded", f"{model.name} is unloaded", {"model": model.name})

    # -- errors ------------------------------------------------------------------------------

    def _does_not_fit(self, model: RegisteredModel) -> HttpError:
        """Return why there is no room for a model, and what would make some."""
        assert model.need is not None
        budget = self.budget_bytes
        needs = f"The model {model.name!r} needs {model.need.in_words()}"
        less = "give it a smaller KV pool (--kv-cache-memory) or a shorter --max-model-len"
        if model.need_bytes > budget:
            message = (
                f"{needs}, and all models together may take {budget / GIB:.2f} GiB: raise "
                f"--model-memory, or {less}."
            )
        else:
            pinned = [each for each in self._models if each.is_pinned and each.is_in_memory]
            left = budget - sum(each.need_bytes for each in pinned)
            names = ", ".join(f"{each.name} ({each.need_bytes / GIB:.2f} GiB)" for each in pinned)
            message = (
                f"{needs}, and {left / GIB:.2f} GiB of {budget / GIB:.2f} are left beside what is "
                f"pinned, {names}: unload one of these (POST /models/unload), raise "
                f"--model-memory, or {less}."
            )
        headers = {"x-should-retry": "false"}
        return HttpError(503, message, code="model_does_not_fit", headers=headers)

    def _as_answer(self, model: RegisteredModel, error: Exception) -> HttpError:
        """Return the error that requests get which asked for a model that cannot be loaded."""
        if isinstance(error, HttpError):
            return error
        if isinstance(error, EngineUnavailableError):
            return to_http_error(error)
        if not isinstance(error, OctavoError):
            _log.error("unexpected %s", type(error).__name__, exc_info=error)
            reason = "internal error"
        else:
            _log.error("%s could not be loaded: %s", model.name, error)
            path = model.entry.path  # which clients must not learn
            reason = str(error).replace(str(path), path.name)
        message = f"The model {model.name!r} could not be loaded: {reason}"
        headers = {"x-should-retry": "false"}
        return HttpError(500, message, code="model_load_failed", headers=headers)

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> None:
        """Load the models that were named, as far as there is room for all of them.

        Raises:
            ConfigError, ModelError, EngineError: one of them cannot be loaded.
            EngineUnavailableError: the server is stopping.
        """
        self._begin(self._run())
        orders: list[LoadOrder] = []
        taken = 0
        for model in [each for each in self._models if each.entry.loads_at_start]:
            model.planned = await asyncio.to_thread(self._settings.plan, model.entry)
            model.need = model.planned.need
            if model.need_bytes > self.budget_bytes:
                raise ConfigError(self._does_not_fit(model).message)
            if taken + model.need_bytes > self.budget_bytes:
                _log.info(
                    "%s is loaded when it is asked for, in place of others: it needs %s",
                    model.name,
                    model.need.in_words(),
                )
                continue
            taken += model.need_bytes
            orders.append(self._order(model))
            orders[-1].is_asked_for = True
        await asyncio.gather(*(order.done for order in orders), return_exceptions=True)
        for order in orders:
            if order.cause is not None:
                raise order.cause

    @property
    def loaded(self) -> Sequence[ServedModel]:
        """The models that are in memory, or on their way out of it."""
        return [each.served for each in self._models if each.served is not None]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return sum(order.num_waiting for order in self._orders)

    async def stop(self) -> None:
        """End all requests and all engines. May be repeated."""
        self._is_stopping = True
        for order in list(self._orders):
            error = EngineUnavailableError("the server is stopping")
            order.refuse(to_http_error(error), error)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self.loaded))
