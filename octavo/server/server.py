"""`OctavoServer`, one server from its start to its end.

start     engine and tokenizer, side by side ─► ready
SIGTERM   drain: new requests are refused, running ones may finish within --drain-timeout
again     stop: streams get one error event
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from octavo.base.errors import ConfigError, EngineUnavailableError, OctavoError
from octavo.core.limits import QueueLimits
from octavo.server.api.prompts import PromptRenderer
from octavo.server.api.server_context import ANY_NAME, ServerContext
from octavo.server.app import create_server_app
from octavo.server.engine.client import ProcessEngine
from octavo.server.engine.generation import RequestRules
from octavo.server.engine.process import ProcessLauncher
from octavo.server.engine.response_cache import ResponseCache
from octavo.server.engine.served_loras import ServedLoras
from octavo.server.engine.ttft_admission import TTFTAdmission
from octavo.server.engine.unread_output import UnreadOutputMemory
from octavo.server.engine.waiting_queue import DEFAULT_LIMITS
from octavo.server.http.access_control import App, DrainState
from octavo.server.http.background import post_in_background
from octavo.server.http.connection import uvicorn_config
from octavo.server.http.tenants import Tenants
from octavo.server.log_lines import log_event
from octavo.server.settings import (
    DEFAULT_SCALE_DOWN_AFTER,
    DEFAULT_TARGET_TTFT,
    ROUTER_NAMES,
    STOP_SIGNALS,
    ServerSettings,
)
from octavo.server.watch.logs import RequestLog
from octavo.server.watch.metrics import Metrics
from octavo.server.watch.observer_group import ObserverGroup
from octavo.server.watch.status import StatusLine
from octavo.server.watch.step_stream import StepStream
from octavo.serving.refusals import GENERATES_NOTHING
from octavo.settings.engine import EngineArgs, parse_bytes
from octavo.settings.replica_range import ReplicaRange
from octavo.sources.open import load_tokenizer
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.core.scaling import ScalingLimits
    from octavo.cost.step_facts import StepFacts
    from octavo.server.engine.elastic import Elastic
    from octavo.server.engine.replicas import Launchers, ReplicaSet
    from octavo.server.engine.step_prediction import FindCalibration

_log = logging.getLogger("octavo.server")

# After the engine has stopped, streams have this long to tell their clients.
_LAST_WORDS_SECONDS = 1.0


class OctavoServer:
    """One server: the engine, the HTTP side, and their observers. ``run`` is called once."""

    def __init__(
        self,
        args: EngineArgs,
        settings: ServerSettings,
        path: Path,
        listener: socket.socket,
        launcher: ProcessLauncher | Launchers,
        find_calibration: FindCalibration = lambda: None,
    ):
        self.settings = settings
        self.drain_state = DrainState()
        self._path = path
        self._listener = listener
        given = tuple(name for name in settings.served_model_name if name != ANY_NAME)
        self._names = given or (model_name(args.model),)
        self._model_argument = None if given else args.model
        self._loras = ServedLoras(path, (*self._names, args.model), args.named_adapters)
        self._metrics = Metrics(self._names[0], has_replicas=args.has_replicas)
        self._status = StatusLine(settings.status_interval)
        self._steps = StepStream()
        self._tenants = Tenants(settings)
        self._tokenizer: Tokenizer | None = None
        request_log = RequestLog(
            self._decode if settings.log_prompts else None, later=post_in_background
        )
        self._observers = ObserverGroup(self._metrics, self._status, self._steps, request_log)
        self.replicas: ReplicaSet | None = None
        self._elastic: Elastic | None = None
        self.engine = self._create_engine(args, launcher)
        self._find_calibration = find_calibration
        self._hurry = asyncio.Event()  # set by the second signal
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def _create_engine(
        self, args: EngineArgs, launcher: ProcessLauncher | Launchers
    ) -> ProcessEngine | ReplicaSet:
        settings = self.settings
        limits = QueueLimits(
            args.max_queued_requests, args.max_queued_tokens or DEFAULT_LIMITS.max_tokens
        )
        most_seconds = settings.max_predicted_ttft_seconds
        if most_seconds is None and args.replicas.is_elastic:
            most_seconds = math.inf  # replicas come by the prediction, and none is refused
        options: dict[str, Any] = {
            "engine_timeout": settings.engine_timeout,
            "ttft_admission": None if most_seconds is None else TTFTAdmission(most_seconds),
            "max_work": settings.max_work,
            "rules": RequestRules(settings.allow_window, settings.max_output_tokens),
            "unread": UnreadOutputMemory(parse_bytes(settings.max_unread_bytes)),
            "resumes_streams": settings.resume_streams,
        }
        if not args.has_replicas:
            return ProcessEngine(
                cast(ProcessLauncher, launcher), limits, self._observers, **options
            )
        from octavo.core.disaggregation import LongerThan
        from octavo.core.routing import router_named
        from octavo.server.engine.elastic import Elastic
        from octavo.server.engine.replicas import ReplicaSet

        launchers, most_local = (
            cast("Launchers", launcher),
            settings.max_local_prefill_length,
        )
        _log.info("%s", launchers.describe())
        self.replicas = ReplicaSet(
            launchers.create,
            args.replicas.least,
            partial(router_named, settings.router or ROUTER_NAMES[0]),
            limits,
            self._observers,
            caches_prefixes=args.enable_prefix_caching,
            num_prefill=args.prefill_replicas,
            links_kv=args.distributed is not None,
            prefill_rule=None if most_local is None else LongerThan(most_local),
            **options,
        )
        if args.replicas.is_elastic:
            self._elastic = Elastic(
                self.replicas, _scaling_limits(args.replicas, settings), self._observers
            )
        return self.replicas

    async def run(self) -> int:
        """Serve until the end; return the exit status.

        Raises:
            ConfigError, ModelError, EngineError: the engine could not start.
        """
        started = time.monotonic()
        with self._signals():
            starting = asyncio.create_task(self.engine.start())
            try:
                await asyncio.to_thread(self._loras.read_named)
                self._tokenizer = await asyncio.to_thread(load_tokenizer, self._path)
                app = self._create_app(self._tokenizer)
                await self._check_template()
                async with self._served(app) as serving:
                    with contextlib.suppress(EngineUnavailableError):  # stopped before it began
                        await starting
                        if "pooling" in self.engine.facts.info:
                            self._prompts.no_chats = GENERATES_NOTHING
                        await asyncio.to_thread(self._loras.check_named, self.engine.facts)
                        gc.collect()
                        gc.freeze()  # to look at all modules and tokens takes longer than a token
                        self._announce(time.monotonic() - started)
                        await self._predict_steps()
                    await self._wait_for_the_end(serving)
                    return 1 if self.engine.has_given_up else 0
            finally:
                await self.engine.stop()
                await asyncio.gather(starting, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _served(self, app: App) -> AsyncIterator[asyncio.Task[None]]:
        """Answer HTTP within the block; the yielded task ends when that does.

        At the end of the block the engine is stopped first, and then the connections, so that open
        streams get their error event.
        """
        server = _Uvicorn(uvicorn_config(app, self.settings))
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        status_line = asyncio.create_task(self._status.run())
        scaling = asyncio.create_task(self._scale())
        try:
            yield serving
        finally:
            scaling.cancel()
            await self.engine.stop()
            server.should_exit = server.force_exit = True
            status_line.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _scale(self) -> None:
        """Have replicas come and go, where they do."""
        if self._elastic is not None:
            await self._elastic.run()

    async def _wait_for_the_end(self, serving: asyncio.Task[None]) -> None:
        stopped = asyncio.create_task(self._stopped.wait())
        given_up = asyncio.create_task(self.engine.wait_until_given_up())
        await asyncio.wait({serving, stopped, given_up}, return_when=asyncio.FIRST_COMPLETED)
        if given_up.done():  # waiting requests would wait for ever
            self._hurry.set()
            self._begin_stop()
            await stopped
        given_up.cancel()
        stopped.cancel()

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids)

    async def _check_template(self) -> None:
        """Render a conversation, so that an error in the chat template shows at the start.

        It also imports what the first client would have to wait for.

        Raises:
            ConfigError: the template that was given does not work. A model whose own template does
                not can still complete texts.
        """
        try:
            await self._prompts.chat([{"role": "user", "content": "Hello"}])
        except OctavoError as error:
            if self.settings.chat_template is not None:
                raise ConfigError(
                    f"chat_template {self.settings.chat_template} does not work: {error}"
                ) from None
            _log.warning("chats will be refused: %s", error)

    def _create_app(self, tokenizer: Tokenizer) -> App:
        cache_bytes = parse_bytes(self.settings.response_cache)
        cache = ResponseCache(self.engine, cache_bytes, self._observers) if cache_bytes else None
        self._metrics.observe_engine(self.engine, self.replicas)
        self._prompts = PromptRenderer(
            tokenizer,
            chat_template=_read_template(self.settings.chat_template),
            trust_request_chat_template=self.settings.trust_request_chat_template,
        )
        server = ServerContext(
            self.settings,
            self.engine,
            self._prompts,
            self._metrics,
            self.drain_state,
            self._names,
            int(time.time()),
            self._observers,
            self._steps,
            model_argument=self._model_argument,
            model_path=self._path,
            response_cache=cache,
            replicas=self.replicas,
            loras=self._loras,
        )
        return create_server_app(server, self._tenants)

    def _announce(self, seconds: float) -> None:
        facts = self.engine.facts
        for choice in facts.choices:
            _log.info("%s", choice)
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        info = {key: value for key, value in facts.info.items() if value is not None}
        log_event(
            "ready",
            f"{self._names[0]} is ready on {url} after {seconds:.1f} s "
            f"({info['device']}, {info['kernels']} kernels, "
            f"context {facts.max_model_len}, {facts.max_num_seqs} requests at once)",
            {"url": url, "model": self._names[0], "seconds": round(seconds, 3), **info},
        )
        if self._tenants.is_open and not self.settings.is_loopback:
            _log.warning("%s", without_a_key(url))

    async def _predict_steps(self) -> None:
        """Have steps measured against the facts known of this machine; without any, log why not."""
        try:
            found = await asyncio.to_thread(self._step_facts)
            self.engine.set_step_facts(found)
        except (ConfigError, EngineUnavailableError) as error:
            _log.info("what bounds the engine's steps is not measured: %s", error)
            return
        known = "by the roofline" if found.measured is None else "as they were measured here"
        _log.info("steps are predicted %s (%s)", known, found.device.name)

    def _step_facts(self) -> StepFacts:
        # Imported here, because it takes a while that the start need not wait for.
        from octavo.server.engine.step_prediction import step_facts

        return step_facts(self.engine.facts, self._find_calibration())

    # -- the end -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, self._on_signal)
        try:
            yield
        finally:
            for signum in STOP_SIGNALS:
                loop.remove_signal_handler(signum)

    def _on_signal(self) -> None:
        if self._stopping is not None:
            self._hurry.set()
        self._begin_stop()

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self.drain_state.is_draining = True
            self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        """Let running requests finish, as long as there is time, and then end."""
        _log.info("stopping: %d requests may finish", self.engine.num_unfinished)
        deadline = time.monotonic() + self.settings.drain_timeout
        while self._tenants.num_running and time.monotonic() < deadline:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), 0.02)
                break
        await self.engine.stop()
        self._steps.end()
        last = time.monotonic() + _LAST_WORDS_SECONDS
        while self._has_listeners and time.monotonic() < last:
            await asyncio.sleep(0.01)
        self._stopped.set()

    @property
    def _has_listeners(self) -> bool:
        return bool(self._tenants.num_running or self._steps.num_viewers)


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that leaves signals to `OctavoServer`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _scaling_limits(replicas: ReplicaRange, settings: ServerSettings) -> ScalingLimits:
    from octavo.core.scaling import ScalingLimits

    target, after = settings.target_ttft_seconds, settings.scale_down_after
    return ScalingLimits(
        replicas.least,
        replicas.most,
        DEFAULT_TARGET_TTFT if target is None else target,
        down_after=DEFAULT_SCALE_DOWN_AFTER if after is None else after,
    )


def model_name(model: str) -> str:
    """Return the name of a model for clients: the argument, or the last part of a path."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def without_a_key(url: str) -> str:
    """Return the warning about a server that a network can reach and that asks for no key."""
    return (
        f"NO API KEY: all who can reach {url} may use it. Give --api-key-file to ask for a key, or "
        "--host 127.0.0.1 to keep it to this machine. Clients may name the server by its address, "
        f"{socket.gethostname()} or localhost; --allowed-host allows another name"
    )


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path} cannot be read: {error}") from None
