"""`Front`: the requests of clients, whichever engine computes them.

It checks and counts requests, turns messages of engines into deltas, and decides what becomes of
the requests of an engine that dies:

- Requests that waited in its queue, or were between two steps, run on another engine, or the next.
- Requests of the step that it died in are suspects; `CrashIsolation` finds out which one is the
  cause.
- A client that has seen part of its answer gets an error, since that answer cannot be begun anew;
  or, where the operator wants that, another engine goes on with it (`OutputRecord`).

A seed is part of every request, so that a second run gives the answer that the first would have.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.base.errors import (
    ConstraintError,
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
from octavo.server.engine.output_record import OutputRecord
from octavo.server.engine.ttft_admission import TTFTAdmission
from octavo.server.engine.unread_output import UnreadOutputMemory
from octavo.server.engine.waiting_queue import (
    DEFAULT_LIMITS,
    EngineLink,
    PendingGeneration,
    QueuedWork,
    WaitingQueue,
)
from octavo.server.engine.wire import (
    Message,
    delta_from_list,
    error_from_message,
    logprobs_from_list,
    params_to_dict,
    set_stats,
)
from octavo.serving.outputs import Delta

if TYPE_CHECKING:
    from octavo.cost.step_facts import StepFacts

_MAX_DEPARTED = 1024
# A step brings fewer tokens of a sample, and what was not delivered was of the last steps.
_MARGIN_TOKENS = 32


class Front(abc.ABC):
    """Requests of clients and what is known of them. Belongs to one event loop.

    A subclass has the engines, and is an `EngineClient`.

    Args:
        resumes_streams: another engine goes on with answers of one that died.
    """

    def __init__(
        self,
        limits: QueueLimits = DEFAULT_LIMITS,
        observer: EngineObserver | None = None,
        *,
        ttft_admission: TTFTAdmission | None = None,
        max_work: int | None = None,
        rules: RequestRules | None = None,
        unread: UnreadOutputMemory | None = None,
        resumes_streams: bool = False,
    ):
        self._observer = observer or EngineObserver()
        self._ttft_admission = ttft_admission
        self._rules = rules or RequestRules()
        self._unread = unread or UnreadOutputMemory()
        self._resumes_streams = resumes_streams
        self._facts: EngineFacts | None = None  # of the first engine: those after it are the same
        self._step_facts: StepFacts | None = None
        self._waiting_queue = WaitingQueue(limits, self._observer, max_work)
        self._crash_isolation = CrashIsolation()
        self._shows_snapshots = False
        self._entries: dict[str, PendingGeneration] = {}  # in order of arrival
        # Fingerprints of those whose client has left. The engine may be at work on them still.
        self._departed: OrderedDict[str, bytes] = OrderedDict()

    # -- the engines -------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def state(self) -> EngineState: ...

    @property
    @abc.abstractmethod
    def is_stopping(self) -> bool: ...

    @abc.abstractmethod
    def _known_facts(self) -> EngineFacts | None:
        """Return the facts that an engine has reported; None before one was ready."""

    @abc.abstractmethod
    def _dispatch(self, entry: PendingGeneration) -> None:
        """Send a request to an engine as soon as one can take it."""

    @abc.abstractmethod
    def _engine_for_suspect(self) -> EngineLink | None:
        """Return the engine to run a suspect on now; None if it has to wait."""

    @abc.abstractmethod
    def _load_before(self, tenant: str, num_tokens: int) -> tuple[StepStats, QueuedWork]:
        """Return the figures of the engine that a prompt of so many tokens would wait for, and the
        work that waits before it."""

    # -- EngineClient ------------------------------------------------------------------------

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            facts = self._known_facts()
            if facts is None:
                raise EngineUnavailableError("the model is still being loaded", retry_after=1.0)
            self._facts = self._rules.applied_to(facts)
        return self._facts

    @property
    def num_unfinished(self) -> int:
        """Number of generations that are not over, waiting ones too."""
        return len(self._entries)

    @property
    def has_given_up(self) -> bool:
        return self.state is EngineState.FAILED

    def check_capacity(self, tenant: str = "") -> None:
        self._check_open()
        self._waiting_queue.check_capacity(tenant)

    def check_size(self, num_requests: int, num_tokens: int) -> None:
        self._waiting_queue.check_size(RequestWork(num_requests, num_tokens))

    def submit(self, request: GenerationRequest) -> Generation:
        self._check_open()
        self._check_request(request)
        entry = PendingGeneration(
            Generation(request, self._withdraw, self._unread),
            fingerprint(request),
            record=OutputRecord.of(request.params) if self._resumes_streams else None,
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
        self._dispatch(entry)
        return entry.generation

    def _check_open(self) -> None:
        if self.is_stopping:
            raise EngineUnavailableError("the server is stopping", retry_after=1.0)
        if self.state is EngineState.FAILED:
            raise EngineUnavailableError("the engine does not start any more")

    def _predict(self, ttft_admission: TTFTAdmission, request: GenerationRequest) -> float | None:
        """Return the predicted seconds to its first token; raise QueueFullError if that is too
        long."""
        num_tokens = len(request.prompt_token_ids)
        ttft_admission.note_prompt(num_tokens)
        try:
            stats, waiting = self._load_before(request.tenant, num_tokens)
            return ttft_admission.check(self.facts, stats, waiting, num_tokens)
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

    # -- an engine's death -------------------------------------------------------------------

    def _take_death(self, engine: EngineLink, at_work: Sequence[str]) -> bool:
        """Decide about every request that a dead engine had; return whether one of them may be
        the cause."""
        names = {_request_id_of(name) for name in at_work}
        known = {name: found for name in names if (found := self._fingerprint_of(name))}
        self._crash_isolation.note_crash(set(known.values()), had_company=len(known) < len(names))
        for entry in list(self._entries.values()):
            if entry.engine is engine:
                self._take_back(entry, "the engine was restarted while this request ran")
            elif self._crash_isolation.is_quarantined(entry.fingerprint):
                self._fail(entry, _quarantined(), "error")
        return bool(known)

    def _take_back(self, entry: PendingGeneration, why: str) -> None:
        """Have a request of an engine that has ended run again, or fail it."""
        if entry.generation.has_begun and not self._may_go_on(entry):
            self._fail(entry, EngineError(why), "error")
        elif self._crash_isolation.is_quarantined(entry.fingerprint):
            self._fail(entry, _quarantined(), "error")
        else:
            self._requeue(entry)

    def _may_go_on(self, entry: PendingGeneration) -> bool:
        """Return whether another engine may go on with an answer that the client has begun to
        read."""
        return entry.record is not None and self._resumes_streams

    def _fingerprint_of(self, request_id: str) -> bytes | None:
        """Return the fingerprint of a request; None for those that are over, and for the engine's
        own."""
        entry = self._entries.get(request_id)
        return self._departed.get(request_id) if entry is None else entry.fingerprint

    def _requeue(self, entry: PendingGeneration) -> None:
        """Have it run again, from where its output ends, or from its beginning."""
        entry.engine = None
        entry.release_at = entry.generation.stats.num_longest_tokens + _MARGIN_TOKENS
        if entry.record is None or entry.record.is_empty:
            entry.last_times.clear()
            entry.generation.restart()
        else:
            entry.record.go_on(entry.generation.stats)
        self._waiting_queue.requeue(entry)

    # -- to an engine ------------------------------------------------------------------------

    def _send_next_suspect(self) -> None:
        """Run the next suspect isolated, if it is its turn and an engine can take it."""
        entry = self._crash_isolation.next()
        if entry is not None and (engine := self._engine_for_suspect()) is not None:
            self._crash_isolation.started(entry)
            self._send(entry, engine, isolated=True)

    def _send(
        self, entry: PendingGeneration, engine: EngineLink, *, isolated: bool = False
    ) -> None:
        request = entry.generation.request
        entry.engine = engine
        message = {
            "op": "add",
            "id": entry.sent_id,
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
        if entry.record is not None and not entry.record.is_empty:
            message["resumed"] = entry.record.resumed()
        engine.send(message | self._further_fields(entry, engine, isolated=isolated))

    def _further_fields(
        self, entry: PendingGeneration, engine: EngineLink, *, isolated: bool
    ) -> Message:
        """Return the fields by which an engine passes KV on, or gets some: none."""
        return {}

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

    def _fail_unavailable(self) -> None:
        """Fail what is left: no engine will come back."""
        self._fail_all(EngineUnavailableError("the engine does not start any more"), "error")

    def _abandon(self, entry: PendingGeneration, reason: str) -> None:
        """End a generation that the engine may be computing."""
        if entry.engine is not None:
            request_id = entry.generation.request.request_id
            entry.engine.send({"op": "abort", "id": entry.sent_id})
            self._departed[request_id] = entry.fingerprint
            if len(self._departed) > _MAX_DEPARTED:
                self._departed.popitem(last=False)
        self._close(entry, reason)

    def _close(self, entry: PendingGeneration, reason: str) -> None:
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

    # -- from an engine ----------------------------------------------------------------------

    def _entry_of(self, engine: EngineLink, sent_id: str) -> PendingGeneration | None:
        """Return the request that an engine names; None if it is over, or taken back from there."""
        entry = self._entries.get(_request_id_of(sent_id))
        is_there = entry is not None and entry.engine is engine and entry.sent_id == sent_id
        return entry if is_there else None

    def _take_refusal(self, engine: EngineLink, message: Message) -> None:
        entry = self._entry_of(engine, message["id"])
        if entry is not None:
            error = error_from_message(message)
            if isinstance(error, ConstraintError):
                self._observer.on_constraint_refused(error.reason)
            elif isinstance(error, QueueFullError):
                self._observer.on_rejected("constraints")
            entry.generation.fail(error)
            self._close(entry, "error")

    def _take_step(
        self, engine: EngineLink, message: Message, before: StepStats, stats: StepStats
    ) -> None:
        """Take in what a step brought; ``stats`` are its figures, ``before`` those of the step
        before it."""
        now = message["time"]
        for sent_id in message["begun"]:
            entry = self._entry_of(engine, sent_id)
            if entry is not None and not entry.has_begun:
                self._waiting_queue.note_started(entry, now)
        grown: dict[PendingGeneration, list[Delta]] = {}
        for items in message["deltas"]:
            sent_id, delta = delta_from_list(items)
            entry = self._entry_of(engine, sent_id)
            if entry is not None:
                grown.setdefault(entry, []).append(delta)
                if entry.record is not None:
                    entry.record.add(delta)
        for sent_id, values in message["stats"].items():
            entry = self._entry_of(engine, sent_id)
            if entry is not None:
                set_stats(entry.generation.stats, values)
                if entry.record is not None:
                    entry.record.correct(entry.generation.stats)
        for sent_id, entries in message.get("prompt_logprobs", {}).items():
            entry = self._entry_of(engine, sent_id)
            if entry is not None:
                entry.generation.push_prompt_logprobs(logprobs_from_list(entries))
        if self._ttft_admission is not None:
            self._ttft_admission.note_step(before, stats)
        for entry, deltas in grown.items():
            self._push(entry, deltas, now)
        self._unread.keep_within()

    @abc.abstractmethod
    def _note_success(self, engine: EngineLink | None) -> None:
        """Note that an engine has brought a request to its end."""

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
            self._note_success(entry.engine)
            self._crash_isolation.clear_suspicion(entry.fingerprint)
            if self._ttft_admission is not None:
                self._ttft_admission.note_answer(generation.stats.num_longest_tokens)
            self._close(entry, generation.finish_reason or "error")
        elif self._crash_isolation.is_running(entry):
            self._release_suspect(entry)

    def _release_suspect(self, entry: PendingGeneration) -> None:
        """Let a suspect share steps again, if it has got beyond the point of the crash."""
        is_beyond = (
            entry.release_at is not None
            and entry.generation.stats.num_longest_tokens >= entry.release_at
        )
        if is_beyond and self._crash_isolation.release(entry) and entry.engine is not None:
            entry.engine.send({"op": "release", "id": entry.sent_id})
            self._send_next_suspect()


def _request_id_of(sent_id: str) -> str:
    """Return the id of a request, by what an engine calls it or a sample of it."""
    return sent_id.partition("#")[0].partition("~")[0]


def _quarantined() -> QuarantinedError:
    return QuarantinedError(
        "the engine died each time it ran this request alone, so it is not tried again for a while"
    )
