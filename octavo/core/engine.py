"""The loop: schedule, execute, update. It knows no model, no text and no device."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

from octavo import faults
from octavo.core.batch import Batch, StepOutput
from octavo.core.clock import Clock, WallClock
from octavo.core.executor import Executor, FailedStep, StepHandle
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import RequestUpdate, Scheduler
from octavo.core.stats import StepStats

_log = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One finished step: what it ran, what it brought, and how the engine stands after it."""

    batch: Batch
    updates: list[RequestUpdate]
    stats: StepStats


class Engine:
    """Drives a scheduler and an executor. Not thread-safe: one thread calls it.

    ``step`` is all that most callers need. A caller that has other work to do while the device is
    busy, or that owns the clock, calls ``begin_step`` and ``finish_step``.

    A request can only fail itself. When a step raises, nothing of it has been taken in, so it can
    be run again: its batch is cut in halves, which become the next two steps, and so on until the
    request that makes it raise stands alone and ends with an error. Among n requests that takes
    2 log2(n) further steps, and since no result depends on what else is in a batch, the others
    do not notice.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Clock | None = None):
        self.scheduler = scheduler
        self.executor = executor
        self.clock: Clock = clock or WallClock()
        self._submitted: deque[tuple[Batch, StepHandle]] = deque()
        self._halves: deque[Batch] = deque()  # of batches that raised, to be run before others
        # Times that the audit found the block pool damaged: a bug of ours, and never expected.
        self.num_invariant_violations = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.requests or self._submitted or self._halves)

    def add(self, request: Request) -> None:
        """Queue a request; raises a ``RequestError`` if it can never be served."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment, in any state. Unknown or ended ids are no error."""
        return self.scheduler.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, stop_reason: str) -> Request | None:
        """End a request because of what its text says (a stop string)."""
        return self.scheduler.finish(request_id, FinishReason.STOP, stop_reason)

    def fail(self, request: Request, error: str) -> None:
        """End a request that cannot go on, whatever its state, with an error."""
        request.error = error
        if self.scheduler.finish(request.request_id, FinishReason.ERROR) is None:
            request.finish_reason = FinishReason.ERROR

    def step(self) -> EngineStep | None:
        """Run one step; None if there is nothing to do.

        With an executor of depth d, d batches are in flight while results are awaited.
        """
        while len(self._submitted) < self.executor.depth and self.begin_step():
            pass
        return self.finish_step() if self._submitted else None

    def begin_step(self) -> bool:
        """Schedule a batch and submit it. False if no request has anything to compute now."""
        batch = self._halves.popleft() if self._halves else self.scheduler.schedule()
        if not batch.items:
            assert self._submitted or not self.scheduler.requests, "the scheduler is stuck"
            return False
        now = self.clock.now()
        for item in batch.items:
            stats = item.request.stats
            if stats.first_scheduled_time is None:
                stats.first_scheduled_time = now
        handle: StepHandle
        try:
            if faults.hit("executor.submit"):
                raise RuntimeError("a fault was asked for")
            handle = self.executor.submit(batch)
        except Exception as error:
            handle = FailedStep(error)
        self._submitted.append((batch, handle))
        return True

    def finish_step(self) -> EngineStep:
        """Wait for the oldest submitted batch and take in its results."""
        batch, handle = self._submitted.popleft()
        try:
            output = handle.result()
        except Exception as error:
            if batch.num_seqs > 1 or batch.block_copies:
                self._cut(batch)
                return EngineStep(batch, [], self._stats(batch, []))
            output = self._blame(batch, error)
        updates = self.scheduler.update(batch, output)
        self._audit()
        now = self.clock.now()
        for update in updates:
            if update.new_token_ids:
                stats = update.request.stats
                if stats.first_token_time is None:
                    stats.first_token_time = now
                stats.last_token_time = now
        return EngineStep(batch, updates, self._stats(batch, updates))

    def close(self) -> None:
        """Abort everything and release the executor."""
        for request_id in list(self.scheduler.requests):
            self.abort(request_id)
        while self._submitted or self._halves:
            self.step()
        self.executor.close()

    def _cut(self, batch: Batch) -> None:
        """Have a batch that raised run again, in two halves."""
        # Whether its block copies were made cannot be known, and by now their sources may have
        # been written to: those who wait for copies begin anew.
        copied = {target for _, target in batch.block_copies}
        items = []
        for item in batch.items:
            if copied.isdisjoint(item.request.block_ids):
                items.append(item)
            else:
                self.scheduler.retract(item.request)
        middle = (len(items) + 1) // 2
        for part in (items[middle:], items[:middle]):
            if part:
                half = replace(batch, items=tuple(part), block_copies=())
                self._halves.appendleft(half)
        self.scheduler.report_again(batch.finished_ids + batch.preempted_ids)

    def _blame(self, batch: Batch, error: Exception) -> StepOutput:
        """The output of a step that raised because of its only request."""
        (item,) = batch.items
        request_id = item.request.request_id
        _log.error("request %s failed in step %d", request_id, batch.step_id, exc_info=error)
        # The executor may not have come to hear of those that left before this step.
        self.scheduler.report_again(batch.finished_ids + batch.preempted_ids)
        return StepOutput({}, errors={request_id: f"{type(error).__name__}: {error}"})

    def _audit(self) -> None:
        """Check the block pool: its counts after every step, all of it when nothing runs.

        A leak shows at the first quiet moment. It is counted and logged, not raised: the results
        of the step are good.
        """
        blocks = self.scheduler.block_manager
        try:
            assert 0 <= blocks.num_cached_blocks <= blocks.num_available_blocks
            if not self.has_unfinished_requests:
                blocks.check_integrity([])
        except AssertionError as violation:
            self.num_invariant_violations += 1
            _log.error("the block pool is damaged, please report this: %s", violation)

    def _stats(self, batch: Batch, updates: list[RequestUpdate]) -> StepStats:
        scheduler, blocks = self.scheduler, self.scheduler.block_manager
        return StepStats(
            step_id=batch.step_id,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_seqs=batch.num_seqs,
            num_tokens=batch.num_tokens + sum(map(_tokens_of_further_rounds, updates)),
            num_preempted=len(batch.preempted_ids),
            num_finished=sum(update.request.is_finished for update in updates),
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_used_blocks=blocks.num_used_blocks,
            kv_waste=blocks.waste(scheduler.running),
            prefix_tokens_queried=scheduler.prefix_tokens_queried,
            prefix_tokens_hit=scheduler.prefix_tokens_hit,
            num_invariant_violations=self.num_invariant_violations,
        )


def _tokens_of_further_rounds(update: RequestUpdate) -> int:
    return max(0, len(update.new_token_ids) - 1)
