"""`ProcessEngine`, the `EngineClient` of an engine in a process of its own.

Requests become messages to that process, and its messages become deltas. When an engine dies, its
requests fare as follows:

- Requests that waited in its queue, or were between two steps, run on the next engine.
- Requests of the step that it died in are suspects; `CrashIsolation` finds out which one is the
  cause.
- A client that has seen part of its answer gets an error: that answer cannot be begun anew.

A seed is part of every request, so that a second run gives the answer that the first would have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.base.errors import (
    DeadlineError,
    EngineError,
    EngineUnavailableError,
    QuarantinedError,
    QueueFullError,
)
from octavo.core.limits import (
    QueueLimits,
    RequestWork,
    check_output_tokens,
    check_sink_window,
    check_vocabulary,
    checked_token_ids,
    total_tokens_of,
)
from octavo.core.stats import StepStats
from octavo.server.engine.crash_isolation import CrashIsolation, fingerprint
from octavo.server.engine.generation import (
    EngineFacts,
    EngineObserver,
    EngineState,
    Generation,
    GenerationRequest,
    RequestRules,
)
from octavo.server.engine.process import ProcessLauncher
from octavo.server.engine.supervisor import Supervisor
from octavo.server.engine.ttft_admission import TTFTAdmission
from octavo.server.engine.unread_output import UnreadOutputMemory
from octavo.server.engine.waiting_queue import DEFAULT_LIMITS, PendingGeneration, WaitingQueue
from octavo.server.engine.wire import (
    Message,
    delta_from_list,
    error_from_message,
    logprobs_from_list,
    params_to_dict,
    record_from_list,
    set_stats,
)
from octavo.serving.outputs import Delta

if TYPE_CHECKING:
    from octavo.cost.step_facts import StepFacts

_log = logging.getLogger("octavo")

_MAX_DEPARTED = 1024


class ProcessEngine:
    """An `EngineClient` whose engine runs in a process of its own. Belongs to one event loop."""

    def __init__(
        self,
        launcher: ProcessLauncher,
        limits: QueueLimits = DEFAULT_LIMITS,
        observer: EngineObserver | None = None,
        *,
        engine_timeout: float = 300.0,
        ttft_admission: TTFTAdmission | None = None,
        max_work: int | None = None,
        rules: RequestRules | None = None,
        unread: UnreadOutputMemory | None = None,
    ):
        self._observer = observer or EngineObserver()
        self._ttft_admission = ttft_admission
        self._rules = rules or RequestRules()
        self._unread = unread or UnreadOutputMemory()
        self._facts: EngineFacts | None = None  # of the first engine: all others are the same
        self._step_facts: StepFacts | None = None
        self._supervisor = Supervisor(launcher, self, engine_timeout=engine_timeout)
        self._waiting_queue = WaitingQueue(limits, self._observer, max_work)
        self._crash_isolation = CrashIsolation()
        self._stats = StepStats.idle()
        self._shows_snapshots = False
        self._entries: dict[str, PendingGeneration] = {}  # in order of arrival
        # Fingerprints of those whose client has left. The engine may be at work on them still.
        self._departed: OrderedDict[str, bytes] = OrderedDict()

    # -- EngineClient ------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            if self._supervisor.facts is None:
                raise EngineUnavailableError("the model is still being loaded", retry_after=1.0)
            self._facts = self._rules.applied_to(self._supervisor.facts)
        return self._facts

    @property
    def stats(self) -> StepStats:
        return self._stats

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def num_unfinished(self) -> int:
        """Number of generations that are not over, waiting ones too."""
        return len(self._entries)

    def enable_snapshots(self, is_enabled: bool) -> None:
        self._shows_snapshots = is_enabled
        if self.state is EngineState.READY:
            self._send_snapshots_op()

    def check_capacity(self, tenant: str = "") -> None:
        self._check_open()
        self._waiting_queue.check_capacity(tenant)

    def check_size(self, num_requests: int, num_tokens: int) -> None:
        self._waiting_queue.check_size(RequestWork(num_requests, num_tokens))

    def submit(self, request: GenerationRequest) -> Generation:
        self._check_open()
        self._check_request(request)
        entry = PendingGeneration(
            Generation(request, self._withdraw, self._unread), fingerprint(request)
        )
        if self._crash_isolation.is_quarantined(entry.fingerprint):
            raise _quarantined()
        if self._ttft_admission is not None:
            entry.generation.stats.predicted_ttft = self._predict(self._ttft_admission, request)
        self._waiting_queue.add(entry)
        self._entries[request.request_id] = entry
        self._observer.on_submitted(entry.generation)
        if request.deadline is not None:
            delay = request.deadline - time.monotonic()
            if delay <= 0:  # a timer could come after the answer
                self._time_out(entry)
                return entry.generation
            loop = asyncio.get_running_loop()
            entry.timer = loop.call_later(delay, self._time_out, entry)
        if self.state is EngineState.READY:
            self._dispatch(entry)
        return entry.generation

    def _check_open(self) -> None:
        if self._supervisor.is_stopping:
            raise EngineUnavailableError("the server is stopping", retry_after=1.0)
        if self.state is EngineState.FAILED:
            raise EngineUnavailableError("the engine does not start any more")

    def _predict(self, ttft_admission: TTFTAdmission, request: GenerationRequest) -> float | None:
        """Return the predicted seconds to its first token; raise QueueFullError if that is too
        long."""
        num_tokens = len(request.prompt_token_ids)
        try:
            waiting = self._waiting_queue.work_before(request.tenant, num_tokens)
            return ttft_admission.check(self.facts, self._stats, waiting, num_tokens)
        except QueueFullError:
            self._observer.on_rejected("predicted_ttft")
            raise

    def _check_request(self, request: GenerationRequest) -> None:
        """Raise a RequestError if the model could never serve it."""
        facts = self.facts
        sink_window = facts.sink_windows.of(request.params, facts.max_model_len)
        num_tokens = total_tokens_of(
            len(request.prompt_token_ids),
            request.params.max_tokens,
            facts.max_model_len,
            facts.num_slots,
            sink_window,
        )
        check_output_tokens(request.params.max_tokens, facts.max_output_tokens, sink_window)
        if sink_window is not None:
            step_tokens = facts.max_num_batched_tokens
            check_sink_window(
                sink_window, num_tokens, facts.num_blocks, facts.block_size, step_tokens
            )
        checked_token_ids(request.prompt_token_ids, facts.vocab_size, "prompt")
        check_vocabulary(request.params, facts.vocab_size)

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> None:
        """Launch the engine, and return when it is ready.

        Raises:
            ModelError, ConfigError, EngineError: what kept it from starting.
        """
        await self._supervisor.start()

    def set_step_facts(self, facts: StepFacts) -> None:
        """Have the engine, and every later one, measure its steps against a prediction of their
        times.

        The admission by predicted TTFT uses the same prediction.

        Raises:
            ConfigError: the device has no known peak for what the model computes in.
        """
        steps = facts.step_model()
        self._step_facts = facts
        if self._ttft_admission is not None:
            self._ttft_admission.set_step_model(steps, self.facts)
        if self.state is EngineState.READY:
            self._send_step_facts()

    async def wait_until_given_up(self) -> None:
        """Return when the engine is down for good without having been asked to stop."""
        await self._supervisor.wait_until_given_up()

    @property
    def has_given_up(self) -> bool:
        return self.state is EngineState.FAILED

    async def stop(self) -> None:
        """End all generations and the engine. May be repeated."""
        self._fail_all(EngineUnavailableError("the server is stopping"), "abort")
        await self._supervisor.stop()

    # -- SupervisorListener ------------------------------------------------------------------

    def on_engine_state(self, state: EngineState, detail: str) -> None:
        self._observer.on_engine_state(state, detail)
        match state:
            case EngineState.READY:
                self._stats = StepStats.idle(self.facts.num_blocks)
                self._send_step_facts()
                if self._shows_snapshots:
                    self._send_snapshots_op()
                for entry in list(self._entries.values()):
                    self._dispatch(entry)
            case EngineState.FAILED:
                error = EngineUnavailableError("the engine does not start any more")
                self._fail_all(error, "error")

    def on_engine_death(self, at_work: Sequence[str]) -> bool:
        """Decide about every request that the dead engine had; return whether one of them may be
        the cause."""
        names = {name.partition("#")[0] for name in at_work}  # without the number of the sample
        known = {name: found for name in names if (found := self._fingerprint_of(name))}
        self._crash_isolation.note_crash(set(known.values()), had_company=len(known) < len(names))
        for entry in list(self._entries.values()):
            if entry.is_sent and entry.generation.has_begun:
                error = EngineError("the engine was restarted while this request ran")
                self._fail(entry, error, "error")
            elif self._crash_isolation.is_quarantined(entry.fingerprint):
                self._fail(entry, _quarantined(), "error")
            elif entry.is_sent:
                self._requeue(entry)
        self._stats = StepStats.idle()
        return bool(known)

    def on_engine_message(self, message: Message) -> None:
        match message["ev"]:
            case "step":
                self._take_step(message)
            case "idle" | "pong":
                self._stats = record_from_list(message["record"])
            case "snapshot":
                self._observer.on_snapshot(self._stats.step_id, message["snapshot"])
            case "refused":
                entry = self._entries.get(message["id"])
                if entry is not None:
                    entry.generation.fail(error_from_message(message))
                    self._end(entry, "error")

    def _fingerprint_of(self, request_id: str) -> bytes | None:
        """Return the fingerprint of a request; None for those that are over, and for the engine's
        own."""
        entry = self._entries.get(request_id)
        return self._departed.get(request_id) if entry is None else entry.fingerprint

    def _requeue(self, entry: PendingGeneration) -> None:
        """Have it run again, from its beginning."""
        entry.is_sent = False
        entry.last_times.clear()
        entry.generation.restart()
        self._waiting_queue.requeue(entry)

    # -- to the engine -----------------------------------------------------------------------

    def _dispatch(self, entry: PendingGeneration) -> None:
        """Send it to the engine, or, if it is a suspect, queue it for an isolated run."""
        if self._crash_isolation.is_suspected(entry.fingerprint):
            self._crash_isolation.enqueue(entry)
            self._send_next_suspect()
        else:
            self._send(entry)

    def _send_next_suspect(self) -> None:
        if self.state is EngineState.READY:
            entry = self._crash_isolation.next()
            if entry is not None:
                self._send(entry, isolated=True)

    def _send_snapshots_op(self) -> None:
        self._supervisor.send({"op": "snapshots", "is_enabled": self._shows_snapshots})

    def _send_step_facts(self) -> None:
        if self._step_facts is not None:
            self._supervisor.send({"op": "meter", "facts": self._step_facts.as_json()})

    def _send(self, entry: PendingGeneration, *, isolated: bool = False) -> None:
        request = entry.generation.request
        entry.is_sent = True
        self._supervisor.send(
            {
                "op": "add",
                "id": request.request_id,
                "ids": request.prompt_token_ids,
                "params": params_to_dict(request.params),
                "bad_words": request.bad_words_token_ids,
                "priority": request.priority,
                "salt": request.cache_salt,
                "tenant": request.tenant,
                "weight": request.weight,
                "arrival": request.arrival_time,
                "isolated": isolated,
            }
        )

    # -- the end of a generation -------------------------------------------------------------

    def _withdraw(self, generation: Generation) -> None:
        """Abort a generation whose consumer has closed it."""
        entry = self._entries.get(generation.request.request_id)
        if entry is not None and entry.generation is generation:
            self._abandon(entry, "abort")

    def _time_out(self, entry: PendingGeneration) -> None:
        where = "while it ran" if entry.has_begun else "in the queue"
        request = entry.generation.request
        limit = (request.deadline or 0.0) - request.arrival_time
        self._fail(entry, DeadlineError(f"the timeout of {limit:g} s passed {where}"), "timeout")

    def _fail(self, entry: PendingGeneration, error: Exception, reason: str) -> None:
        entry.generation.fail(error)
        self._abandon(entry, reason)

    def _fail_all(self, error: Exception, reason: str) -> None:
        for entry in list(self._entries.values()):
            self._fail(entry, error, reason)

    def _abandon(self, entry: PendingGeneration, reason: str) -> None:
        """End a generation that the engine may be computing."""
        if entry.is_sent:
            request_id = entry.generation.request.request_id
            self._supervisor.send({"op": "abort", "id": request_id})
            self._departed[request_id] = entry.fingerprint
            if len(self._departed) > _MAX_DEPARTED:
                self._departed.popitem(last=False)
        self._end(entry, reason)

    def _end(self, entry: PendingGeneration, reason: str) -> None:
        """Remove a generation, which is over by now."""
        del self._entries[entry.generation.request.request_id]
        self._waiting_queue.remove(entry)
        if entry.timer is not None:
            entry.timer.cancel()
        stats = entry.generation.stats
        if stats.e2e is None:
            stats.e2e = time.monotonic() - entry.generation.request.arrival_time
        self._observer.on_finished(entry.generation, reason)
        self._send_next_suspect()

    # -- from the engine ---------------------------------------------------------------------

    def _take_step(self, message: Message) -> None:
        now = message["time"]
        for request_id in message["begun"]:
            entry = self._entries.get(request_id)
            if entry is not None and not entry.has_begun:
                self._waiting_queue.note_started(entry, now)
        for request_id, values in message["stats"].items():
            entry = self._entries.get(request_id)
            if entry is not None:
                set_stats(entry.generation.stats, values)
        for request_id, entries in message.get("prompt_logprobs", {}).items():
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.generation.push_prompt_logprobs(logprobs_from_list(entries))
        grown: dict[PendingGeneration, list[Delta]] = {}
        for items in message["deltas"]:
            request_id, delta = delta_from_list(items)
            entry = self._entries.get(request_id)
            if entry is not None:
                grown.setdefault(entry, []).append(delta)
        before, self._stats = self._stats, record_from_list(message["record"])
        if self._ttft_admission is not None:
            self._ttft_admission.note_step(before, self._stats)
        for entry, deltas in grown.items():
            self._push(entry, deltas, now)
        self._unread.keep_within()
        self._observer.on_step(self._stats)
        if message.get("snapshot"):
            self._observer.on_snapshot(self._stats.step_id, message["snapshot"])

    def _push(self, entry: PendingGeneration, deltas: list[Delta], now: float) -> None:
        generation = entry.generation
        for delta in deltas:
            if delta.token_ids:
                last = entry.last_times.get(delta.index)
                entry.last_times[delta.index] = now
                gap = None if last is None else now - last
                self._observer.on_tokens(generation, len(delta.token_ids), gap)
        generation.push(deltas)
        if generation.is_over:
            self._supervisor.note_success()
            self._crash_isolation.clear_suspicion(entry.fingerprint)
            if self._ttft_admission is not None:
                self._ttft_admission.note_answer(generation.stats.num_longest_tokens)
            self._end(entry, generation.finish_reason or "error")


def _quarantined() -> QuarantinedError:
    return QuarantinedError(
        "the engine died each time it ran this request alone, so it is not tried again for a while"
    )
