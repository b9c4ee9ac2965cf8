"""`ServedModel`, one model of a server: its engine, its tokenizer, and the observers of both.

start     engine and tokenizer, side by side ─► ready
stop      the engine ends, and what observes it
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from octavo.base.errors import ConfigError, EngineUnavailableError, OctavoError
from octavo.core.limits import QueueLimits
from octavo.server.api.prompts import PromptRenderer
from octavo.server.api.server_context import ANY_NAME, ServerContext
from octavo.server.engine.client import ProcessEngine
from octavo.server.engine.generation import EngineFacts, RequestRules
from octavo.server.engine.process import ProcessLauncher
from octavo.server.engine.response_cache import ResponseCache
from octavo.server.engine.served_loras import ServedLoras
from octavo.server.engine.ttft_admission import TTFTAdmission
from octavo.server.engine.unread_output import UnreadOutputMemory
from octavo.server.engine.waiting_queue import DEFAULT_LIMITS
from octavo.server.http.access_control import DrainState
from octavo.server.http.background import post_in_background
from octavo.server.settings import (
    DEFAULT_SCALE_DOWN_AFTER,
    DEFAULT_TARGET_TTFT,
    ROUTER_NAMES,
    ServerSettings,
)
from octavo.server.watch.logs import RequestLog
from octavo.server.watch.metrics import MetricFamilies, Metrics
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
    from octavo.server.api.server_context import ModelDirectory
    from octavo.server.engine.elastic import Elastic
    from octavo.server.engine.replicas import Launchers, ReplicaSet
    from octavo.server.engine.step_prediction import FindCalibration

_log = logging.getLogger("octavo.server")


@dataclass(frozen=True)
class ModelIdentity:
    """The names of a model, and its place.

    Args:
        names: those that clients may use; answers have the first.
        argument: of the command line, a valid name, but never shown; None where it is none.
        path: of its files, never shown either.
        log_name: its name in the log's lines; "" where a server has no other model.
    """

    names: tuple[str, ...]
    path: Path
    argument: str | None = None
    log_name: str = ""


@dataclass(frozen=True)
class ServerCommons:
    """The objects that all models of a server share.

    Args:
        created: Unix time of the server's start.
        models: all models, where there may be several.
    """

    settings: ServerSettings
    drain_state: DrainState
    created: int
    families: MetricFamilies
    unread: UnreadOutputMemory
    models: ModelDirectory | None = None

    @classmethod
    def create(
        cls,
        settings: ServerSettings,
        models: ModelDirectory | None = None,
        *,
        has_replicas: bool = False,
    ) -> ServerCommons:
        """Return those of a server that starts now."""
        return cls(
            settings,
            DrainState(),
            int(time.time()),
            MetricFamilies(has_replicas=has_replicas),
            UnreadOutputMemory(parse_bytes(settings.max_unread_bytes)),
            models,
        )


class ServedModel:
    """A model from its start (`launch`, `prepare`, `ready`, `observe`) to its stop."""

    def __init__(
        self,
        identity: ModelIdentity,
        args: EngineArgs,
        launcher: ProcessLauncher | Launchers,
        commons: ServerCommons,
        *,
        chat_template: str | None = None,
        find_calibration: FindCalibration = lambda: None,
    ):
        self.identity = identity
        self._commons = commons
        self._settings = commons.settings
        self._chat_template = chat_template
        self._find_calibration = find_calibration
        self._loras = ServedLoras(identity.path, (*identity.names, args.model), args.named_adapters)
        self._prompts: PromptRenderer | None = None
        self._tokenizer: Tokenizer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.steps = StepStream()
        self.metrics = Metrics(identity.names[0], commons.families)
        self._status = StatusLine(self._settings.status_interval, identity.log_name)
        request_log = RequestLog(
            self._decode if self._settings.log_prompts else None,
            later=post_in_background,
            model=identity.log_name,
        )
        self.observers = ObserverGroup(self.metrics, self._status, self.steps, request_log)
        self.replicas: ReplicaSet | None = None
        self._elastic: Elastic | None = None
        self.engine = self._create_engine(args, launcher)

    # -- start and stop ----------------------------------------------------------------------

    def launch(self) -> None:
        """Begin to start the engine, beside which `prepare` may run."""
        self._starting = asyncio.create_task(self.engine.start())

    async def ready(self) -> None:
        """Return when the engine is ready.

        Raises:
            ModelError, ConfigError, EngineError: what kept it from starting.
            EngineUnavailableError: it was stopped before.
        """
        assert self._starting is not None, "launch comes first"
        await self._starting
        if "pooling" in self.engine.facts.info and self._prompts is not None:
            self._prompts.no_chats = GENERATES_NOTHING
        await asyncio.to_thread(self._loras.check_named, self.engine.facts)

    async def prepare(self) -> ServerContext:
        """Load the tokenizer, and return what routes work with: its engine need not be ready.

        Raises:
            ConfigError, ModelError: the tokenizer or the chat template cannot be used.
        """
        await asyncio.to_thread(self._loras.read_named)
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self.identity.path)
        prompts = self._prompts = PromptRenderer(
            self._tokenizer,
            chat_template=_read_template(self._chat_template),
            trust_request_chat_template=self._settings.trust_request_chat_template,
        )
        self.metrics.observe_engine(self.engine, self.replicas)
        context = self._create_context(prompts)
        await self._check_template(prompts)
        return context

    def observe(self) -> None:
        """Begin to write status lines, and to have replicas come and go, where they do."""
        self._tasks.append(asyncio.create_task(self._status.run()))
        if self._elastic is not None:
            self._tasks.append(asyncio.create_task(self._elastic.run()))

    async def stop(self, why: str = "the server is stopping") -> None:
        """End all generations, which are told why, and the engine. May be repeated."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        await self.engine.stop(why)
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)

    async def predict_steps(self) -> None:
        """Have steps measured against the facts known of this machine; without any, log why not."""
        try:
            found = await asyncio.to_thread(self._step_facts)
            self.engine.set_step_facts(found)
        except (ConfigError, EngineUnavailableError) as error:
            _log.info("what bounds the engine's steps is not measured: %s", error)
            return
        known = "by the roofline" if found.measured is None else "as they were measured here"
        _log.info("steps are predicted %s (%s)", known, found.device.name)

    # -- parts -------------------------------------------------------------------------------

    def _create_engine(
        self, args: EngineArgs, launcher: ProcessLauncher | Launchers
    ) -> ProcessEngine | ReplicaSet:
        settings = self._settings
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
            "unread": self._commons.unread,
            "resumes_streams": settings.resume_streams,
        }
        if not args.has_replicas:
            return ProcessEngine(cast(ProcessLauncher, launcher), limits, self.observers, **options)
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
            self.observers,
            caches_prefixes=args.enable_prefix_caching,
            num_prefill=args.prefill_replicas,
            links_kv=args.distributed is not None,
            prefill_rule=None if most_local is None else LongerThan(most_local),
            **options,
        )
        if args.replicas.is_elastic:
            self._elastic = Elastic(
                self.replicas, _scaling_limits(args.replicas, settings), self.observers
            )
        return self.replicas

    def _create_context(self, prompts: PromptRenderer) -> ServerContext:
        cache_bytes = parse_bytes(self._settings.response_cache)
        cache = ResponseCache(self.engine, cache_bytes, self.observers) if cache_bytes else None
        return ServerContext(
            self._settings,
            self.engine,
            prompts,
            self.metrics,
            self._commons.drain_state,
            self.identity.names,
            self._commons.created,
            self.observers,
            self.steps,
            model_argument=self.identity.argument,
            model_path=self.identity.path,
            response_cache=cache,
            replicas=self.replicas,
            models=self._commons.models,
            loras=self._loras,
        )

    async def _check_template(self, prompts: PromptRenderer) -> None:
        """Render a conversation, so that an error in the chat template shows at the start.

        It also imports what the first client would have to wait for.

        Raises:
            ConfigError: the template that was given does not work. A model whose own template does
                not can still complete texts.
        """
        try:
            await prompts.chat([{"role": "user", "content": "Hello"}])
        except OctavoError as error:
            if self._chat_template is not None:
                raise ConfigError(
                    f"chat_template {self._chat_template} does not work: {error}"
                ) from None
            _log.warning("chats will be refused: %s", error)

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids)

    def _step_facts(self) -> StepFacts:
        # Imported here, because it takes a while that the start need not wait for.
        from octavo.server.engine.step_prediction import step_facts

        return step_facts(self.engine.facts, self._find_calibration())


def log_choices(facts: EngineFacts) -> None:
    """Write what was chosen for each setting that was "auto", a line each."""
    for choice in facts.choices:
        _log.info("%s", choice)


def describe_engine(facts: EngineFacts) -> str:
    """Return what an engine runs on, and its limits, in words for the log."""
    info = facts.info
    return (
        f"{info.get('device')}, {info.get('kernels')} kernels, "
        f"context {facts.max_model_len}, {facts.max_num_seqs} requests at once"
    )


def identity_of(model: str, path: Path, served_names: Sequence[str]) -> ModelIdentity:
    """Return the identity of a server's only model, by the argument that names it."""
    given = tuple(name for name in served_names if name != ANY_NAME)
    return ModelIdentity(given or (model_name(model),), path, None if given else model)


def model_name(model: str) -> str:
    """Return the name of a model for clients: the argument, or the last part of a path."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _scaling_limits(replicas: ReplicaRange, settings: ServerSettings) -> ScalingLimits:
    from octavo.core.scaling import ScalingLimits

    target, after = settings.target_ttft_seconds, settings.scale_down_after
    return ScalingLimits(
        replicas.least,
        replicas.most,
        DEFAULT_TARGET_TTFT if target is None else target,
        down_after=DEFAULT_SCALE_DOWN_AFTER if after is None else after,
    )


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path} cannot be read: {error}") from None
