"""The engine's process as the server sees it: it is given requests, watched, and replaced.

What happens to the requests of an engine that dies:

- Not yet given to it: they stay in the queue.
- Running, and the client has seen part of the answer: one error. It cannot be begun anew.
- Running, and the client has seen nothing: they run again, each alone with what is new, since one
  of them may be what killed the engine. A request that was there twice is refused from then on,
  so that nobody can kill the engine more than twice with it.

A seed is part of every request, so that a second run gives the answer that the first would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import signal
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, cast

from octavo import errors
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import total_tokens_of
from octavo.errors import (
    DeadlineError,
    EngineError,
    EngineUnavailableError,
    OctavoError,
    PromptTooLongError,
    QuarantinedError,
    QueueFullError,
)
from octavo.server.engine_process import Launcher, RunningEngine
from octavo.server.generation import (
    Delta,
    EngineFacts,
    EngineLoad,
    EngineState,
    Generation,
    GenerationRequest,
    Observer,
)
from octavo.server.wire import Decoder, Message, delta_from_list, encode, logprobs_from_list
from octavo.text_engine import check_vocabulary, checked_token_ids

_log = logging.getLogger("octavo")

# An engine that dies this often by itself, with no request to blame, is given up.
_MAX_DEATHS_IN_A_ROW = 5
_RESTART_PAUSES = (0.0, 0.0, 1.0, 2.0, 4.0)  # seconds, by the number of such deaths
_QUARANTINE_SECONDS = 600.0
_LAST_WORDS_SECONDS = 2.0  # for an engine that hangs to say where
_MAX_FINGERPRINTS = 1024
_DEFAULTS = SamplingParams()

# Prompt tokens that may wait where nothing else is said.
DEFAULT_MAX_QUEUED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of what may wait; None is no bound. Requests count by sample."""

    max_requests: int | None = 1024
    max_tokens: int | None = DEFAULT_MAX_QUEUED_TOKENS


@dataclass(eq=False, slots=True)
class _Entry:
    """A generation that is not over."""

    generation: Generation
    fingerprint: bytes
    is_sent: bool = False  # to the engine that runs now
    has_begun: bool = False  # that engine has computed something of it
    last_times: dict[int, float] = field(default_factory=dict)  # of tokens, by sample
    timer: asyncio.TimerHandle | None = None

    @property
    def num_samples(self) -> int:
        return self.generation.request.params.num_samples

    @property
    def num_tokens(self) -> int:
        return self.num_samples * len(self.generation.request.prompt_token_ids)


class ProcessEngine:
    """An `EngineClient` whose engine runs in a process of its own. Lives on one event loop."""

    def __init__(
        self,
        launcher: Launcher,
        limits: QueueLimits | None = None,
        observer: Observer | None = None,
        *,
        engine_timeout: float = 300.0,
    ):
        self._launcher = launcher
        self._limits = limits or QueueLimits()
        self._observer = observer or Observer()
        self._engine_timeout = engine_timeout
        self._state = EngineState.STARTING
        self._facts: EngineFacts | None = None
        self._load = EngineLoad()
        self._engine: RunningEngine | None = None
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._entries: dict[str, _Entry] = {}  # in order of arrival
        # Requests that were running when an engine died. One of them runs at a time.
        self._suspects: deque[_Entry] = deque()
        self._on_probation: _Entry | None = None
        self._quarantine = _Quarantine()
        self._num_deaths_in_a_row = 0
        self._num_restarts = 0
        self._waiting_requests = 0
        self._waiting_tokens = 0
        self._begun_times: deque[float] = deque(maxlen=256)
        self._last_sign_of_life = 0.0

    # -- EngineClient ------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineUnavailableError("the model is still being loaded", retry_after=1.0)
        return self._facts

    @property
    def load(self) -> EngineLoad:
        return self._load

    @property
    def num_unfinished(self) -> int:
        """Generations that are not over, waiting ones too."""
        return len(self._entries)

    def check_room(self) -> None:
        self._check_open()
        most = self._limits.max_requests
        if most is not None and self._waiting_requests >= most:
            raise QueueFullError(
                f"{self._waiting_requests} requests are waiting already", self._retry_after()
            )

    def submit(self, request: GenerationRequest) -> Generation:
        try:
            self.check_room()
        except QueueFullError:
            self._observer.on_rejected("queue_requests")
            raise
        facts = self.facts
        total_tokens_of(
            len(request.prompt_token_ids),
            request.params.max_tokens,
            facts.max_model_len,
            facts.num_blocks * facts.block_size,
        )
        checked_token_ids(request.prompt_token_ids, facts.vocab_size, "prompt")
        check_vocabulary(request.params, facts.vocab_size)
        entry = _Entry(Generation(request, self._withdraw), _fingerprint(request))
        deaths = self._quarantine.deaths(entry.fingerprint)
        if deaths > 1:
            raise _quarantined()
        self._check_queue(entry)
        self._entries[request.request_id] = entry
        self._count_waiting(entry, 1)
        self._observer.on_submitted(entry.generation)
        if request.deadline is not None:
            delay = request.deadline - time.monotonic()
            if delay <= 0:  # a timer could come after the answer
                self._time_out(entry)
                return entry.generation
            loop = asyncio.get_running_loop()
            entry.timer = loop.call_later(delay, self._time_out, entry)
        if deaths:
            self._suspects.append(entry)
            self._send_next_suspect()
        elif self._state is EngineState.READY:
            self._send_entry(entry)
        return entry.generation

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Launch the engine; returns when it is ready.

        Raises what kept it from starting: ModelError, ConfigError, or EngineError.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise(), name="octavo-supervisor")
        await self._started

    async def wait_until_given_up(self) -> None:
        """Return when no engine will come any more, though nobody asked it to stop."""
        assert self._task is not None
        await asyncio.shield(self._task)
        if not self.has_given_up:  # stopped
            await asyncio.Event().wait()

    @property
    def has_given_up(self) -> bool:
        return self._state is EngineState.FAILED

    async def stop(self, reason: str = "the server is stopping") -> None:
        """End all generations and the engine. May be repeated."""
        self._is_stopping = True
        self._settle_start(EngineUnavailableError(reason))
        for entry in list(self._entries.values()):
            self._fail(entry, EngineUnavailableError(reason), "abort")
        if self._connection is not None:
            self._connection.send({"op": "stop"})
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._task), 1.0)
            if self._engine is not None:
                self._engine.kill()
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _supervise(self) -> None:
        """Run one engine after the other, until one stops because it was told to."""
        while True:
            try:
                await self._run_one()
            except OctavoError as error:  # it said itself why it cannot start
                if self._settle_start(error):
                    self._state = EngineState.FAILED
                    return
                _log.error("the engine did not start again: %s", error)
            if self._is_stopping:
                return
            if self._settle_start(EngineError("the engine ended while it was loading")):
                self._state = EngineState.FAILED
                return
            if self._num_deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW:
                self._give_up()
                return
            self._num_restarts += 1
            self._set_state(EngineState.RESTARTING, f"restart {self._num_restarts}")
            await asyncio.sleep(_RESTART_PAUSES[self._num_deaths_in_a_row])

    def _settle_start(self, error: Exception | None) -> bool:
        """Tell `start` how it went, if it still waits for that; whether it did."""
        if self._started is None or self._started.done():
            return False
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)
        return True

    async def _run_one(self) -> None:
        """Launch an engine and stay with it until it ends."""
        engine = self._engine = self._launcher.launch()
        connection = self._connection = _Connection(self._receive)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: connection, sock=engine.connection)
        connection.send({"op": "start", "args": engine.args})
        self._last_sign_of_life = time.monotonic()
        watchdog = asyncio.create_task(self._watch(engine, connection))
        try:
            await connection.closed
        finally:
            watchdog.cancel()
            self._connection = self._engine = None
            connection.close()
            if self._state is EngineState.READY and not self._is_stopping:
                self._set_state(EngineState.RESTARTING, "the engine died")
            engine.kill()
            status = await asyncio.to_thread(engine.wait)
            self._take_back(status)
        if connection.failure is not None:
            raise error_from_message(connection.failure)

    async def _watch(self, engine: RunningEngine, connection: _Connection) -> None:
        """End an engine that gives no sign of life, with a trace of where it hangs."""
        number = 0
        while self._engine_timeout:
            await asyncio.sleep(min(1.0, self._engine_timeout / 4))
            if self._state is not EngineState.READY:
                continue
            number += 1
            connection.send({"op": "ping", "number": number})
            silence = time.monotonic() - self._last_sign_of_life
            if silence > self._engine_timeout:
                _log.error("the engine has given no sign of life for %.0f s", silence)
                engine.kill(signal.SIGABRT)
                await asyncio.sleep(_LAST_WORDS_SECONDS)
                engine.kill()  # one that is stopped, or hangs in the kernel, hears nothing else
                return

    def _take_back(self, status: str) -> None:
        """Decide about every request that the dead engine had."""
        if self._is_stopping:
            return
        sent = [entry for entry in self._entries.values() if entry.is_sent]
        if not sent:
            self._num_deaths_in_a_row += 1
        if self._facts is not None:
            _log.error("the engine died (%s) with %d requests", status, len(sent))
        self._on_probation = None
        self._load = EngineLoad(
            num_free_blocks=self._load.num_free_blocks, num_restarts=self._num_restarts
        )
        for entry in sent:
            deaths = self._quarantine.add(entry.fingerprint)
            entry.is_sent = False
            if entry.generation.has_begun:
                error = EngineError("the engine was restarted while this request ran")
                self._fail(entry, error, "error")
            elif deaths > 1:
                self._fail(entry, _quarantined(), "error")
            else:
                if entry.has_begun:
                    entry.has_begun = False
                    self._count_waiting(entry, 1)
                entry.last_times.clear()
                entry.generation.restart()
                self._suspects.append(entry)

    def _give_up(self) -> None:
        self._set_state(EngineState.FAILED, "it died too often")
        for entry in list(self._entries.values()):
            self._fail(entry, EngineUnavailableError("the engine does not start any more"), "error")

    def _set_state(self, state: EngineState, detail: str) -> None:
        if state is not self._state:
            self._state = state
            self._observer.on_engine_state(state, detail)

    # -- to the engine -----------------------------------------------------------------------

    def _send_entry(self, entry: _Entry) -> None:
        request = entry.generation.request
        entry.is_sent = True
        assert self._connection is not None
        self._connection.send(
            {
                "op": "add",
                "id": request.request_id,
                "ids": request.prompt_token_ids,
                "params": _params_to_dict(request.params),
                "priority": request.priority,
                "salt": request.cache_salt,
                "arrival": request.arrival_time,
            }
        )

    def _send_all(self) -> None:
        """What has waited for an engine to be there."""
        suspects = set(self._suspects)
        for entry in list(self._entries.values()):
            if not entry.is_sent and entry not in suspects:
                self._send_entry(entry)
        self._send_next_suspect()

    def _send_next_suspect(self) -> None:
        if self._state is not EngineState.READY or self._on_probation is not None:
            return
        while self._suspects:
            entry = self._suspects.popleft()
            if not entry.generation.is_over:
                self._on_probation = entry
                self._send_entry(entry)
                return

    def _withdraw(self, generation: Generation) -> None:
        """The consumer has no more interest."""
        entry = self._entries.get(generation.request.request_id)
        if entry is not None and entry.generation is generation:
            self._tell_abort(entry)
            self._end(entry, "abort")

    def _time_out(self, entry: _Entry) -> None:
        where = "while it ran" if entry.has_begun else "in the queue"
        request = entry.generation.request
        limit = (request.deadline or 0.0) - request.arrival_time
        self._fail(entry, DeadlineError(f"the timeout of {limit:g} s passed {where}"), "timeout")

    def _fail(self, entry: _Entry, error: Exception, reason: str) -> None:
        self._tell_abort(entry)
        entry.generation.fail(error)
        self._end(entry, reason)

    def _tell_abort(self, entry: _Entry) -> None:
        if entry.is_sent and self._connection is not None:
            self._connection.send({"op": "abort", "id": entry.generation.request.request_id})

    def _end(self, entry: _Entry, reason: str) -> None:
        """Forget a generation, which is over by now."""
        del self._entries[entry.generation.request.request_id]
        if not entry.has_begun:
            self._count_waiting(entry, -1)
        if entry.timer is not None:
            entry.timer.cancel()
        stats = entry.generation.stats
        if stats.e2e is None:
            stats.e2e = time.monotonic() - entry.generation.request.arrival_time
        self._observer.on_finished(entry.generation, reason)
        if self._on_probation is entry:
            self._on_probation = None
            self._send_next_suspect()

    # -- from the engine ---------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        self._last_sign_of_life = time.monotonic()
        match message["ev"]:
            case "step":
                self._take_step(message)
            case "load":
                self._load = EngineLoad(**message["load"], num_restarts=self._num_restarts)
            case "refused":
                entry = self._entries.get(message["id"])
                if entry is not None:
                    entry.generation.fail(error_from_message(message))
                    self._end(entry, "error")
            case "ready":
                self._become_ready(message["facts"])

    def _become_ready(self, facts: dict[str, Any]) -> None:
        for name in ("eos_token_ids", "choices"):
            facts[name] = tuple(facts[name])
        self._facts = EngineFacts(**facts)
        self._load = EngineLoad(
            num_free_blocks=self._facts.num_blocks, num_restarts=self._num_restarts
        )
        self._set_state(EngineState.READY, "")
        self._settle_start(None)
        self._send_all()

    def _take_step(self, message: Message) -> None:
        now = message["time"]
        for request_id in message["begun"]:
            entry = self._entries.get(request_id)
            if entry is not None and not entry.has_begun:
                entry.has_begun = True
                self._count_waiting(entry, -1)
                self._begun_times.append(now)
        for request_id, values in message["stats"].items():
            entry = self._entries.get(request_id)
            if entry is not None:
                _set_stats(entry.generation, values)
        for request_id, entries in message.get("prompt_logprobs", {}).items():
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.generation.prompt_logprobs += logprobs_from_list(entries)
        grown: dict[_Entry, list[Delta]] = {}
        for items in message["deltas"]:
            request_id, delta = delta_from_list(items)
            entry = self._entries.get(request_id)
            if entry is not None:
                grown.setdefault(entry, []).append(delta)
        self._load = EngineLoad(**message["load"], num_restarts=self._num_restarts)
        for entry, deltas in grown.items():
            self._push(entry, deltas, now)
        self._observer.on_step(message["tokens"], message["seqs"], self._load)

    def _push(self, entry: _Entry, deltas: list[Delta], now: float) -> None:
        generation = entry.generation
        for delta in deltas:
            if delta.token_ids:
                last = entry.last_times.get(delta.index)
                entry.last_times[delta.index] = now
                gap = None if last is None else now - last
                self._observer.on_tokens(generation, len(delta.token_ids), gap)
        generation.push(deltas)
        if generation.is_over:
            self._num_deaths_in_a_row = 0
            self._quarantine.forget(entry.fingerprint)
            self._end(entry, generation.finish_reason or "error")

    # -- the queue ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_stopping:
            raise EngineUnavailableError("the server is stopping", retry_after=1.0)
        if self._state is EngineState.FAILED:
            raise EngineUnavailableError("the engine does not start any more")

    def _check_queue(self, entry: _Entry) -> None:
        """Raise QueueFullError if this one is too much. Samples of one prompt come together."""
        most = self._limits.max_requests
        waiting = self._waiting_requests
        if most is not None and waiting and waiting + entry.num_samples > most:
            self._observer.on_rejected("queue_requests")
            raise QueueFullError(f"{waiting} requests are waiting already", self._retry_after())
        most = self._limits.max_tokens
        if most is not None and self._waiting_tokens + entry.num_tokens > most:
            self._observer.on_rejected("queue_tokens")
            raise QueueFullError(
                f"{self._waiting_tokens} tokens are waiting already", self._retry_after()
            )

    def _count_waiting(self, entry: _Entry, sign: int) -> None:
        self._waiting_requests += sign * entry.num_samples
        self._waiting_tokens += sign * entry.num_tokens

    def _retry_after(self) -> float:
        """When those who wait now will have begun, as fast as others began lately."""
        times = self._begun_times
        if len(times) < 2:
            return 1.0
        span = max(time.monotonic() - times[0], 0.001)
        rate = len(times) / span
        return min(60.0, max(1.0, self._waiting_requests / rate))


class _Connection(asyncio.Protocol):
    """The server's end of the socket pair."""

    def __init__(self, receive: Any):
        self._receive = receive
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: Message | None = None  # the message "failed", if one came

    def send(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if message["ev"] == "failed":
                self.failure = message
            else:
                self._receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class _Quarantine:
    """How many engines died with a request of the same content, lately."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def deaths(self, fingerprint: bytes) -> int:
        count, since = self._deaths.get(fingerprint, (0, 0.0))
        if count and time.monotonic() - since > _QUARANTINE_SECONDS:
            self.forget(fingerprint)
            return 0
        return count

    def add(self, fingerprint: bytes) -> int:
        count = self.deaths(fingerprint) + 1
        self._deaths[fingerprint] = (count, time.monotonic())
        self._deaths.move_to_end(fingerprint)
        if len(self._deaths) > _MAX_FINGERPRINTS:
            self._deaths.popitem(last=False)
        return count

    def forget(self, fingerprint: bytes) -> None:
        self._deaths.pop(fingerprint, None)


def _quarantined() -> QuarantinedError:
    return QuarantinedError(
        "this request was running each time the engine died, and is not tried again for a while"
    )


def _fingerprint(request: GenerationRequest) -> bytes:
    """What makes two requests the same to the engine, but for their luck."""
    params = dataclasses.replace(request.params, seed=None)
    return hashlib.sha256(f"{request.prompt_token_ids} {params}".encode()).digest()


def _params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    values = {
        one.name: getattr(params, one.name)
        for one in dataclasses.fields(SamplingParams)
        if getattr(params, one.name) != getattr(_DEFAULTS, one.name)
    }
    if params.logit_bias is not None:
        values["logit_bias"] = dict(params.logit_bias)
    return values


def _set_stats(generation: Generation, values: list[Any]) -> None:
    stats = generation.stats
    (
        stats.num_cached_tokens,
        stats.num_preemptions,
        stats.queue_time,
        stats.ttft,
        stats.tpot,
        stats.e2e,
        stats.prefill_time,
        stats.decode_time,
    ) = values


def error_from_message(message: Message) -> OctavoError:
    """The exception that the engine's process named; an EngineError if it is none of ours."""
    kind = getattr(errors, message["kind"], None)
    text = message["message"]
    if kind is PromptTooLongError:
        return PromptTooLongError(text, message["num_prompt_tokens"], message["limit"])
    if kind is errors.InvalidRequestError:
        error = errors.InvalidRequestError(text)
        error.field = message["field"]
        return error
    if kind is errors.ModelFileError or kind is None or not issubclass(kind, OctavoError):
        return EngineError(text)
    made = kind(text)
    assert isinstance(made, OctavoError)
    return made
