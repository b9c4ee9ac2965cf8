"""A closed loop with a fixed number of requests in flight, in which the next begins as one ends.

A batch that is given at once shows an engine at its start and at its end, with all prompts at the
same moment and a tail of few requests. An engine that is always in use does neither. Here the first
requests, the *ramp*, only fill the engine, and a *window* is measured that opens when all of them
have begun to answer and closes while it is still full.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from octavo.base.errors import BenchmarkError
from octavo.bench.offline.session import OfflineSession, latencies, sampling_params
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.core.engine import EngineStep
    from octavo.core.stats import RequestStats
    from octavo.serving.text_engine import SampleGroup

_ids = itertools.count(1)


@dataclass(slots=True)
class LoopRequest:
    """A request that ended in the window. ``gaps_s``: seconds between results with its tokens."""

    request: WorkloadRequest
    stats: RequestStats
    gaps_s: list[float]
    output_token_ids: list[int]


@dataclass(slots=True)
class LoopTiming:
    """Figures of the window.

    ``num_prompt_tokens``: of requests whose first token came in it; ``mean_batch``: requests in a
    step, each step weighted by its time. ``requests``: those that arrived and ended in the window,
    in the order of their ends.
    """

    elapsed_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    mean_batch: float = 0.0
    num_preemptions: int = 0
    requests: list[LoopRequest] = field(default_factory=list)

    @property
    def latencies(self) -> dict[str, list[float]]:
        """Seconds by the name of the latency: of each request that has it; for ITL of each gap."""
        gaps = [gap for each in self.requests for gap in each.gaps_s]
        return {**latencies([each.stats for each in self.requests]), "itl": gaps}


def run_closed_loop(
    session: OfflineSession,
    requests: Sequence[WorkloadRequest],
    concurrency: int,
    *,
    num_ramp: int = 0,
    num_measured: int | None = None,
) -> LoopTiming:
    """Keep ``concurrency`` of the requests in flight, in their order.

    Prompts are given as token ids. What is still in flight when the window closes is aborted.

    Args:
        num_ramp: requests that come first and only fill the engine.
        num_measured: the window closes when so many requests have ended in it; None runs until
            all have.

    Raises:
        BenchmarkError: a request failed. RequestError: one cannot be served.
    """
    loop = _ClosedLoop(session, requests, concurrency, num_ramp)
    try:
        return loop.run(num_measured)
    finally:
        loop.abort()


def staggered(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Return the same requests with answers of 1/n, 2/n, … n/n of their lengths.

    As a ramp, they end one after another, and so do those that follow them: requests of one length
    that begin together would end together for ever, and their successors' prompts would all come at
    once.
    """
    count = len(requests)
    return [
        replace(request, output_len=-(-(request.output_len or 1) * (index + 1) // count))
        for index, request in enumerate(requests)
    ]


@dataclass(slots=True)
class _RequestInFlight:
    request: WorkloadRequest
    group: SampleGroup
    is_ramp: bool
    is_measured: bool
    last_token: float | None = None
    gaps_s: list[float] = field(default_factory=list)


class _ClosedLoop:
    def __init__(
        self,
        session: OfflineSession,
        requests: Sequence[WorkloadRequest],
        concurrency: int,
        num_ramp: int,
    ):
        self._engine = session.loaded.text_engine
        self._requests = iter(requests)
        self._concurrency = concurrency
        self._ramp_to_begin = num_ramp
        self._ramp_without_token = num_ramp
        self._busy_s = 0.0  # seconds of each step times its requests, in the window
        self._in_flight: dict[str, _RequestInFlight] = {}
        self._timing = LoopTiming()
        self._opened: float | None = None

    def run(self, num_measured: int | None) -> LoopTiming:
        timing = self._timing
        if self._ramp_without_token == 0:
            self._open()
        self._refill()
        while self._in_flight and (num_measured is None or len(timing.requests) < num_measured):
            self._step()
            if self._opened is None and self._ramp_without_token == 0:
                self._open()
            self._refill()
        if self._opened is None:
            raise BenchmarkError("the closed loop ended before all of its ramp had begun to answer")
        timing.elapsed_s = time.perf_counter() - self._opened
        timing.num_preemptions = self._scheduler_preemptions() - self._preemptions_before
        timing.mean_batch = self._busy_s / timing.elapsed_s
        return timing

    def abort(self) -> None:
        """Abort the requests in flight, and let the engine process that."""
        for request_id in self._in_flight:
            self._engine.abort(request_id)
        while self._engine.has_unfinished_requests:
            self._engine.step()

    def _open(self) -> None:
        self._preemptions_before = self._scheduler_preemptions()
        self._opened = time.perf_counter()

    def _scheduler_preemptions(self) -> int:
        return self._engine.engine.scheduler.num_preemptions

    def _refill(self) -> None:
        while len(self._in_flight) < self._concurrency:
            request = next(self._requests, None)
            if request is None:
                return
            assert request.prompt_token_ids is not None
            request_id = f"loop-{next(_ids)}"
            group = self._engine.add(
                request_id, None, list(request.prompt_token_ids), sampling_params(request)
            )
            is_ramp = self._ramp_to_begin > 0
            self._ramp_to_begin -= is_ramp
            is_measured = self._opened is not None
            self._in_flight[request_id] = _RequestInFlight(request, group, is_ramp, is_measured)

    def _step(self) -> None:
        begin = time.perf_counter()
        _, done = self._engine.step()
        now = time.perf_counter()
        if done is None:
            return
        if self._opened is not None:
            self._busy_s += done.batch.num_seqs * (now - begin)
        self._take(done, now)

    def _take(self, done: EngineStep, now: float) -> None:
        for update in done.updates:
            request = update.request
            entry = self._in_flight[request.request_id]
            if request.error is not None:
                raise BenchmarkError(f"request {request.request_id} failed: {request.error}")
            if update.new_token_ids:
                self._note_tokens(entry, len(update.new_token_ids), now)
            if request.is_finished:
                del self._in_flight[request.request_id]
                if entry.is_measured:
                    self._timing.requests.append(_ended(entry))

    def _note_tokens(self, entry: _RequestInFlight, count: int, now: float) -> None:
        is_first = entry.last_token is None
        if entry.last_token is not None:
            entry.gaps_s.append(now - entry.last_token)
        elif entry.is_ramp:
            self._ramp_without_token -= 1
        entry.last_token = now
        if self._opened is not None:
            self._timing.num_output_tokens += count
            if is_first:
                self._timing.num_prompt_tokens += len(entry.group.prompt_token_ids)


def _ended(entry: _RequestInFlight) -> LoopRequest:
    request = entry.group.samples[0].request
    return LoopRequest(entry.request, request.stats, entry.gaps_s, list(request.output_token_ids))
