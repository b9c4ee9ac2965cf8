"""The types through which the HTTP side and the engine side of the server talk to each other.

The HTTP side makes a `GenerationRequest`, gives it to an `EngineClient` and reads `Delta`s from
the `Generation` that it gets back. All of this lives on one event loop; nothing here is
thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from octavo.base.errors import ConstraintError, QueueFullError
from octavo.core.batch import TokenLogprobs
from octavo.core.limits import RequestWork
from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import SinkWindowRules
from octavo.core.stats import StepStats
from octavo.server.engine.unread_output import UnreadOutputMemory, bytes_of
from octavo.serving.outputs import Delta

_CHARS_OF_LOGPROB = 64
_FEW_DELTAS = 512  # unread ones, before they are merged
_BYTES_OF_DELTA = 336  # beside what is in it


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be completed, with the parameters of its completions.

    Args:
        request_id: made by the server, never reused.
        arrival_time: ``time.monotonic()`` when the HTTP request came in.
        bad_words_token_ids: what ``Tokenizer.encode_words`` makes of ``params.bad_words``: the
            server computes it, so that no step of the engine waits for it.
        cache_salt: requests share cached prefixes only with those of the same salt.
        deadline: ``time.monotonic()`` at which the request ends with a `DeadlineError`.
        streams: the client sees tokens as they come, so the answer cannot be begun anew.
        is_deterministic: asking again would give the same answer (temperature 0, or a seed of the
            client's own), so that a response cache may keep it. ``params.seed`` does not tell:
            the server draws one where the client gave none.
        external_id: the client's ``x-request-id``, or what the server chose; for logs.
        route: for logs and metrics.
        tenant: the API key or address that asks: limits and fair queuing are by tenant.
        weight: of the tenant in fair queuing.
        constraint_field: the client's name of ``params.structured_outputs``, for errors; empty if
            it is the same.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    streams: bool = False
    is_deterministic: bool = False
    external_id: str = ""
    route: str = ""
    tenant: str = ""
    weight: float = 1.0
    constraint_field: str = ""

    @property
    def work(self) -> RequestWork:
        """Samples and tokens that this request may take at most: all limits count it so, before
        anything is computed."""
        return RequestWork.of(len(self.prompt_token_ids), self.params)


@dataclass(slots=True)
class GenerationStats:
    """Counts and times (seconds) of one generation, as docs/metrics.md defines them.

    Token counts are up to date at any moment; times are None until they are known.
    """

    num_prompt_tokens: int
    num_output_tokens: int = 0  # of all samples
    num_longest_tokens: int = 0  # of the longest sample
    num_cached_tokens: int = 0
    miss_reason: str = ""  # why they are no more (``core.prefix_cache.MissReason``)
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # that were verified
    num_accepted_tokens: int = 0  # of these
    queue_time: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    prefill_time: float | None = None  # first scheduled to first token
    decode_time: float | None = None  # first token to last token
    predicted_ttft: float | None = None  # of the server, before it let it in


class Generation:
    """An answer being generated, as its consumer sees it.

        async with engine.submit(request) as generation:
            async for deltas in generation: ...

    Leaving the ``with`` block ends the generation wherever it stands. Iteration ends after every
    sample has had a delta with a finish_reason, and raises what the engine side had to say
    otherwise (`DeadlineError`, `EngineError`, ...).
    """

    def __init__(
        self,
        request: GenerationRequest,
        abort: Callable[[Generation], None],
        memory: UnreadOutputMemory | None = None,
    ):
        self.request = request
        self.stats = GenerationStats(len(request.prompt_token_ids))
        # Of the prompt's tokens but the first, if they were asked for; complete with the first
        # delta.
        self.prompt_logprobs: list[TokenLogprobs] = []
        # Whether the consumer has seen something that cannot be taken back.
        self.has_begun = False
        self.is_over = False  # nothing more will be pushed
        self.finish_reason: str | None = None  # of the first sample
        self.sample_errors: list[str] = []  # of samples that ended with one
        self.is_from_cache = False  # nothing was computed for it
        self._abort = abort
        self._unfinished = set(range(request.params.num_samples))
        self._num_tokens = [0] * request.params.num_samples
        self._memory = memory or UnreadOutputMemory()
        self._deltas: list[Delta] = []
        self._merge_at = _FEW_DELTAS  # so many of them
        self._error: BaseException | None = None
        self._wakeup: asyncio.Future[None] | None = None
        self._records: list[_Record] = []

    # -- the consumer ------------------------------------------------------------------------

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Delta]:
        """Return the deltas since the last call, oldest first; wait until there is one."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            await self._next_push()
        deltas, self._deltas = self._deltas, []
        self._memory.release(self)
        self.has_begun = True
        return deltas

    async def collect(self) -> list[Delta]:
        """Wait until the last completion has ended, and return all of them in the order of their
        index."""
        while not self.is_over:
            await self._next_push()
        if self._error is not None:
            raise self._error
        completions = [Delta(index) for index in range(self.request.params.num_samples)]
        self._merge()
        for delta in self._deltas:
            completions[delta.index] = delta
        return completions

    def close(self) -> None:
        """Drop what is unread, and abort the request if it is still running. May be repeated."""
        self._memory.release(self)
        self._forget_records()
        if not self.is_over:
            self.is_over = True
            self._abort(self)

    def give_up(self) -> None:
        """End it with a QueueFullError and free what it holds, which is more than there is memory
        for."""
        self._memory.release(self)
        self._deltas.clear()
        self.prompt_logprobs.clear()
        was_over, self.is_over = self.is_over, True
        self._error = QueueFullError(
            "the answer took more memory than there is for what is not read yet: ask for fewer "
            "tokens or log-probabilities, or read a stream as it comes"
        )
        self._forget_records()
        if not was_over:
            self._abort(self)
        self._wake()

    @property
    def num_pending_chars(self) -> int:
        """Number of characters that were pushed and not yet read: the cost of a slow reader.

        A logprob counts as the characters that it takes in an answer, roughly.
        """
        num_logprobs = sum(1 + len(entry.top) for delta in self._deltas for entry in delta.logprobs)
        num_chars = sum(len(delta.text) for delta in self._deltas)
        return num_chars + _CHARS_OF_LOGPROB * num_logprobs

    def record(
        self, on_whole: Callable[[Generation, list[Delta]], None], max_bytes: int | None = None
    ) -> None:
        """Keep every delta, and pass all of them to ``on_whole`` when the last one has come.

        Nothing is handed over if it fails or is closed before, or takes more than ``max_bytes`` or
        than there is memory for. Call it before the first push. Several may ask.
        """
        self._records.append(_Record(self._memory, on_whole, max_bytes))

    def _forget_records(self) -> None:
        for record in self._records:
            record.give_up()

    async def _next_push(self) -> None:
        self._wakeup = asyncio.get_running_loop().create_future()
        try:
            await self._wakeup
        finally:
            self._wakeup = None

    # -- the engine side ---------------------------------------------------------------------

    def push(self, deltas: Sequence[Delta]) -> None:
        """Append the deltas of a step."""
        if self.is_over:
            return
        self._deltas.extend(deltas)
        num_bytes = 0
        stats, num_tokens = self.stats, self._num_tokens
        for delta in deltas:
            num_bytes += bytes_of(len(delta.token_ids), len(delta.text), delta.logprobs)
            stats.num_output_tokens += len(delta.token_ids)
            num_tokens[delta.index] += len(delta.token_ids)
            stats.num_longest_tokens = max(stats.num_longest_tokens, num_tokens[delta.index])
            if delta.finish_reason is not None:
                self._unfinished.discard(delta.index)
                if delta.error is not None:
                    self.sample_errors.append(delta.error)
                if delta.index == 0:
                    self.finish_reason = delta.finish_reason
        self.is_over = not self._unfinished
        self._memory.hold(self, num_bytes)
        if len(self._deltas) >= self._merge_at:
            self._merge()
        for record in self._records:
            record.add(deltas, num_bytes)
            if self.is_over:
                record.end(self)
        if self.request.streams or self.is_over:
            self._wake()

    def push_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Append the log-probabilities that a step has computed of the prompt."""
        if not self.is_over:
            self.prompt_logprobs += entries
            self._memory.hold(self, bytes_of(0, 0, entries))

    def _merge(self) -> None:
        """Merge the unread deltas of each sample into one: a delta takes ten times the memory of
        what it holds."""
        by_sample: dict[int, list[Delta]] = {}
        for delta in self._deltas:
            by_sample.setdefault(delta.index, []).append(delta)
        self._deltas = list(map(_merged, by_sample.values()))
        self._merge_at = max(_FEW_DELTAS, 2 * len(self._deltas))

    def fail(self, error: BaseException) -> None:
        """End it with an error, which the consumer gets after the unread deltas."""
        if not self.is_over:
            if isinstance(error, ConstraintError) and self.request.constraint_field:
                error = error.with_field(self.request.constraint_field)
            self.is_over = True
            self._error = error
            self._forget_records()
            self._wake()

    def restart(self) -> None:
        """Forget all that was pushed: the request is about to run again from its beginning."""
        assert not self.has_begun
        self._memory.release(self)
        self._deltas.clear()
        self.prompt_logprobs.clear()
        for record in self._records:
            record.restart()
        self._unfinished = set(range(self.request.params.num_samples))
        self._num_tokens = [0] * len(self._num_tokens)
        self.sample_errors.clear()
        self.stats = GenerationStats(len(self.request.prompt_token_ids))

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


def _merged(deltas: list[Delta]) -> Delta:
    """Return one delta that stands for several of one sample."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return Delta(
        last.index,
        "".join([delta.text for delta in deltas]),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs],
        last.finish_reason,
        last.stop_reason,
        last.cumulative_logprob,
        last.error,
    )


class _Record:
    """All deltas of an answer, kept for a callback that wants them when it is complete.

    Once it is given up, it keeps nothing.
    """

    def __init__(
        self,
        memory: UnreadOutputMemory,
        on_whole: Callable[[Generation, list[Delta]], None],
        max_bytes: int | None,
    ):
        self._memory = memory
        self._on_whole = on_whole
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._deltas: list[Delta] = []
        self._is_given_up = False

    def add(self, deltas: Sequence[Delta], num_bytes: int) -> None:
        if self._is_given_up:
            return
        self._deltas.extend(deltas)
        self._num_bytes += num_bytes
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            self.give_up()
        else:
            self._memory.hold(self, num_bytes + _BYTES_OF_DELTA * len(deltas))

    def end(self, generation: Generation) -> None:
        """Pass the deltas on: the answer is complete."""
        if not self._is_given_up:
            self._on_whole(generation, self._deltas)
            self.give_up()

    def restart(self) -> None:
        """Forget all deltas: the answer begins anew."""
        self._memory.release(self)
        self._deltas.clear()
        self._num_bytes = 0

    def give_up(self) -> None:
        self._is_given_up = True
        self._memory.release(self)
        self._deltas = []


class EngineState(Enum):
    """State of the engine's process. Only READY answers ``/health`` with 200."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # it died; waiting requests stay in the queue
    FAILED = "failed"  # it will not come back


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about the engine that it reports when it is ready; they are the same after every
    restart.

    Sampling defaults that no request could have (a NaN, a ``top_p`` of 0) are left out: they come
    from a file, and are not to make every request wrong.
    """

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    # Recommended by the model's authors: temperature, top_p, ...
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    # The "engine" object of the JSON outputs: device, dtype, kernels, isa, weights_bytes, ...
    info: dict[str, Any] = field(default_factory=dict)
    # What was chosen for each setting that was "auto", a line each.
    choices: tuple[str, ...] = ()
    # Limits of its steps; see SchedulerConfig.
    max_num_batched_tokens: int = 0
    target_step_seconds: float = 0.0
    # The model as the cost formulas see it (`octavo.cost.rank_model.RankModel`), empty where no
    # model runs, and the settings that a calibration must have been made with to apply.
    rank_model: dict[str, Any] = field(default_factory=dict)
    runs_as: dict[str, Any] = field(default_factory=dict)
    kv_bytes_per_token: float = 0.0
    # For each block table of a request, the positions that its layers attend to; None: all.
    windows: tuple[int | None, ...] = (None,)
    # Sliding window and attention sinks of requests.
    sink_windows: SinkWindowRules = field(default_factory=SinkWindowRules)
    # Limit of the tokens of one answer (`core.limits.most_output_tokens`); the server sets it.
    max_output_tokens: int | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages of the engine's pipeline."""
        return int(self.info.get("pipeline_parallel_size", 1))

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the engine, of all stages."""
        return self.num_stages * int(self.info.get("tensor_parallel_size", 1))

    @property
    def num_slots(self) -> int:
        """Number of tokens whose KV one request can hold in the pool.

        Where sliding windows give blocks back there is no such bound; there ``max_model_len`` is
        the limit.
        """
        if self.windows != (None,):
            return self.max_model_len
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Limits of the server on what clients may ask for, whatever its engine could do.

    Args:
        allow_window: whether requests may set a sliding window of their own. Where the operator
            has set one for all requests, they may anyway.
        max_output_tokens: tokens of one answer; see `core.limits.most_output_tokens`.
    """

    allow_window: bool = True
    max_output_tokens: int | None = None

    def applied_to(self, facts: EngineFacts) -> EngineFacts:
        """Return the facts of an engine with these limits applied."""
        may_be_asked = self.allow_window or facts.sink_windows.window > 0
        sink_windows = replace(facts.sink_windows, may_be_asked=may_be_asked)
        return replace(facts, sink_windows=sink_windows, max_output_tokens=self.max_output_tokens)


class EngineClient(Protocol):
    """The engine as the HTTP side sees it."""

    @property
    def state(self) -> EngineState: ...

    @property
    def facts(self) -> EngineFacts:
        """The engine's facts, once it has been READY; EngineUnavailableError before."""
        ...

    @property
    def stats(self) -> StepStats:
        """Statistics of the engine after its last step; its totals begin at 0 again in a new engine
        process.

        Requests count by sample: ``n=4`` is four.
        """
        ...

    @property
    def num_restarts(self) -> int: ...

    def enable_snapshots(self, is_enabled: bool) -> None:
        """Have the engine send a snapshot after each step, which observers get by ``on_snapshot``,
        or not."""
        ...

    def check_capacity(self, tenant: str = "") -> None:
        """Raise QueueFullError if no further request of a tenant could be queued now, whatever its
        size.

        Cheap: called before the body of a request is read.
        """
        ...

    def check_size(self, num_requests: int, num_tokens: int) -> None:
        """Raise InvalidRequestError if a request of this size could not be queued even if the queue
        were empty.

        Args:
            num_requests: of one client's request; they count by sample.
            num_tokens: of prompts and of answers as long as they may become, by sample.
        """
        ...

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; returns at once.

        Raises:
            RequestError: it can never be served (PromptTooLongError, InvalidRequestError), or not
                now (QueueFullError, with ``retry_after``).
            EngineUnavailableError: the server is stopping, or the engine will not come back.
            QuarantinedError: the same request has brought the engine down before.
        """
        ...


class EngineObserver:
    """Callbacks for what happens to requests and to the engine, called on the event loop.

    Metrics and logs override those that they need.
    """

    def on_submitted(self, generation: Generation) -> None:
        """A request was accepted into the queue."""

    def on_rejected(self, reason: str) -> None:
        """A request was refused for overload.

        ``reason`` is "queue_requests", "queue_tokens", "work", "rate_requests", "rate_tokens",
        "concurrency", "work_of_key", "predicted_ttft", "constraints", "draining" or "unavailable".
        """

    def on_ignored_fields(self, names: Sequence[str]) -> None:
        """A request had fields of these names, which have no effect here."""

    def on_tool_calls(self, format_name: str, num_calls: int, malformed: Sequence[str]) -> None:
        """An answer in a format of chats had so many tool calls, and others that were malformed:
        ``malformed`` has the reason of each (`octavo.chat_formats.text_stream.MalformedCall`)."""

    def on_constraint_refused(self, reason: str) -> None:
        """A request's schema, expression or grammar was refused: a reason of `ConstraintError`."""

    def on_tokens(self, generation: Generation, num_tokens: int, gap: float | None) -> None:
        """A step brought tokens of one sample, ``gap`` seconds after the sample's last ones.

        ``gap`` is None for the first tokens of a sample.
        """

    def on_finished(self, generation: Generation, reason: str) -> None:
        """A request is over, and its stats are final.

        ``reason`` is "stop", "length", "abort", "error" or "timeout"; with several samples, that of
        the first. Called once for each generation that was submitted.
        """

    def on_step(self, stats: StepStats, replica: int | None = None) -> None:
        """An engine has finished a step. ``replica`` is its number; None where there is one
        engine."""

    def on_snapshot(
        self, step_id: int, snapshot: dict[str, Any], replica: int | None = None
    ) -> None:
        """A snapshot of an engine after a step, while snapshots are enabled:
        `octavo.core.engine_snapshot`."""

    def on_engine_state(self, state: EngineState, detail: str, replica: int | None = None) -> None:
        """An engine's process came up, died or was given up, or a replica is being drained."""

    def on_routed(self, replica: int) -> None:
        """A request was sent to a replica, of several."""

    def on_scaled(self, direction: str) -> None:
        """A replica is started (up) or drained (down) since the load asks for it."""

    def on_removed(self, replica: int) -> None:
        """A replica was removed, as an operator had asked: its engine has ended."""
