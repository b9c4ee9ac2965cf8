"""The engine's loop, which schedules a batch, executes it and updates requests with its results.

It knows no model, no text and no device.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from octavo.base.errors import EngineError, PeerEndedError
from octavo.core.batch import Batch, ScheduledRequest, StepOutput
from octavo.core.block_audit import IdleAudit
from octavo.core.clock import Clock, WallClock
from octavo.core.executor import Executor, FailedStep, StepHandle
from octavo.core.idle_offload import IdleOffload
from octavo.core.kv_tables import GONE
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import RequestUpdate, Scheduler
from octavo.core.stats import ConstraintStats, StepStats
from octavo.core.step_meter import NoMeter, StepMeter

_log = logging.getLogger("octavo")

# Seconds of one wait while all requests wait for the store, or for adapters: between two, the
# caller gets control.
_STORE_SECONDS = 0.005
# Seconds at the end for blocks that are not in the store yet.
_LAST_SECONDS = 1.0
# Seconds, between two steps, for the blocks of one request.
_SAVE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One finished step: its batch, the updates of requests, and the engine's figures after it."""

    batch: Batch
    updates: list[RequestUpdate]
    stats: StepStats


class _Submitted(NamedTuple):
    """A step in flight. It is not whole once items were taken out of its batch: it may fail
    because of them."""

    batch: Batch
    handle: StepHandle
    begun_at: float
    is_whole: bool = True


class Engine:
    """Drives a scheduler and an executor. Not thread-safe: one thread calls it.

    ``step`` is all that most callers need. A caller that has other work to do while the device is
    busy, or that owns the clock, calls ``begin_step`` and ``finish_step``.

    A request can only fail itself. When a step raises, none of its results have been taken in, so
    it can be run again: its batch is cut in halves, which become the next two steps, and so on
    until the request that makes it raise stands alone and ends with an error. Among n requests that
    takes 2 log2(n) further steps, and since no result depends on what else is in a batch, the other
    requests do not notice.

    In the same way an ``isolated`` request gets steps of its own, between those of the rest.

    Args:
        clock: the wall clock, if none is given.
        meter: measures each step; its figures are part of ``StepStats``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock | None = None,
        meter: StepMeter | None = None,
    ):
        self.scheduler = scheduler
        self.executor = executor
        self.clock: Clock = clock or WallClock()
        self._meter: StepMeter = meter or NoMeter()
        self.step_seconds = 0.0  # of all steps so far
        self.constraints = ConstraintStats()
        self._submitted: deque[_Submitted] = deque()
        self._last_result_at = -math.inf
        self._halves: deque[Batch] = deque()  # of batches that raised, to be run before others
        self._isolated: set[str] = set()  # ids of unfinished isolated requests
        # Damage of the block pool that was found: a bug, never expected.
        self.num_invariant_violations = 0
        self._idle_audit = IdleAudit(scheduler.block_manager)
        self._store = scheduler.block_manager.store
        self._idle_offload = IdleOffload(scheduler.block_manager)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.requests or self._submitted or self._halves)

    @property
    def next_result_at(self) -> float | None:
        """End of the oldest step in flight, in simulated time. None in real time, or where no
        step is in flight."""
        return self._submitted[0].handle.ready_at if self._submitted else None

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served.
        """
        self.scheduler.add(request)
        request.is_fed = self.scheduler.config.runs_ahead and self.executor.feeds(request)
        if request.isolated:
            self._isolated.add(request.request_id)

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment, in any state. Unknown or ended ids are no error."""
        return self.scheduler.finish(request_id, FinishReason.ABORT)

    def end_isolation(self, request: Request) -> None:
        """Let an isolated request share steps with others from now on."""
        request.isolated = False
        self._isolated.discard(request.request_id)

    def stop(self, request: Request, stop_reason: str, num_output_tokens: int) -> None:
        """End a request whose text reached a stop string with its first ``num_output_tokens``
        tokens. Those after them, of the same step, are taken back."""
        self.scheduler.stop(request, stop_reason, num_output_tokens)

    def fail(self, request: Request, error: str) -> None:
        """End a request that cannot go on, whatever its state, with an error."""
        request.error = error
        if self.scheduler.finish(request.request_id, FinishReason.ERROR) is None:
            request.finish_reason = FinishReason.ERROR

    def step(self) -> EngineStep | None:
        """Run one step; returns None if there is nothing to do, or if all requests wait for the
        store.

        With an executor of depth d, d batches are in flight while results are awaited.
        """
        while len(self._submitted) < self.executor.depth and self.begin_step():
            pass
        return self.finish_step() if self._submitted else None

    def begin_step(self) -> bool:
        """Schedule a batch and submit it. Returns False if no request has anything to compute
        now."""
        if self._submitted and self._isolated:
            return False  # one step at a time, so that an isolated request is in flight alone
        batch = self._next_batch()
        if not batch.items:
            self._drop_step(batch)
            may_wait = not self.scheduler.requests or self._submitted
            if not may_wait and not self._wait():
                raise EngineError("the scheduler is stuck: nothing can run, and nothing is running")
            return False
        self._idle_audit.restart()
        self._idle_offload.restart()
        now = self.clock.now()
        for item in batch.items:
            stats = item.request.stats
            if stats.first_scheduled_time is None:
                stats.first_scheduled_time = now
        handle: StepHandle
        try:
            handle = self.executor.submit(batch)
        except PeerEndedError:  # no step of any batch can be run any more
            raise
        except Exception as error:
            handle = FailedStep(error)
        except BaseException:  # an interruption: its requests stay in flight until it is run
            self._halves.appendleft(self._without_saves(batch))
            raise
        self._submitted.append(_Submitted(batch, handle, now))
        return True

    def _wait(self) -> bool:
        """Wait a moment for KV from the store, or for an adapter, where no request can run without
        these. Returns False if nothing comes."""
        loads = self.scheduler.adapters.wait(_STORE_SECONDS)
        return self._store.wait(0 if loads else _STORE_SECONDS) or loads

    def _next_batch(self) -> Batch:
        while self._halves:
            batch = self._halves.popleft()
            if batch.items:
                return batch
            self._drop_step(batch)
        batch = self.scheduler.schedule()
        if not self._isolated:
            return batch
        self._isolated &= self.scheduler.requests.keys()
        first, *further = _split_isolated(batch)
        self._halves.extend(further)
        return first

    def _drop_step(self, batch: Batch) -> None:
        """Note that a step is not run: its copies are not made, and its departures are reported
        again."""
        self._store.settle(batch.block_copies, are_done=False)
        self._report_again(batch)

    def finish_step(self) -> EngineStep:
        """Wait for the oldest submitted batch and take in its results."""
        batch, handle, begun_at, is_whole = self._submitted.popleft()
        try:
            output = handle.result()
        except PeerEndedError:
            raise
        except Exception as error:
            self._store.settle(batch.block_copies, are_done=False)
            if batch.num_seqs != 1 or batch.block_copies or not is_whole:
                self._bisect(batch)
                nothing = replace(batch, items=())  # its tokens count when they are computed again
                return EngineStep(nothing, [], self._stats(nothing, []))
            output, seconds = self._blame(batch, error), 0.0
        except BaseException:  # an interruption: it is waited for again
            self._submitted.appendleft(_Submitted(batch, handle, begun_at, is_whole))
            raise
        else:
            seconds = self._record_time(batch, begun_at)
            self._store.settle(batch.block_copies, are_done=True)
        updates = self.scheduler.update(batch, output)
        self._check_counts()
        now = self.clock.now()
        for update in updates:
            if update.new_token_ids:
                stats = update.request.stats
                if stats.first_token_time is None:
                    stats.first_token_time = now
                stats.last_token_time = now
        if seconds:
            self._meter.measure(
                batch, _num_multi_steps(batch, updates), self._stage_seconds(seconds, begun_at)
            )
        return EngineStep(batch, updates, self._stats(batch, updates, seconds))

    def _record_time(self, batch: Batch, begun_at: float) -> float:
        """Record the time of a step, from when it could run to its results; returns seconds."""
        now = self.clock.now()
        seconds = now - max(begun_at, self._last_result_at)
        self.scheduler.pacer.observe(batch, seconds)
        if self.scheduler.proposer is not None:
            self.scheduler.proposer.observe_step(batch, seconds)
        self._last_result_at = now
        self.step_seconds += seconds
        return seconds

    def _stage_seconds(self, seconds: float, begun_at: float) -> float:
        """Return the seconds that one stage took for the step that has just ended, if all take as
        long: of all that it was under way, or since the step that it followed from stage to
        stage."""
        executor = self.executor
        stages = 1 if executor.feeds_tokens else executor.depth
        return min(seconds, (self._last_result_at - begun_at) / stages)

    def close(self) -> None:
        """Abort everything and release the executor."""
        for request_id in list(self.scheduler.requests):
            self.abort(request_id)
        while self._submitted or self._halves:
            self.step()
        deadline = self.clock.now() + _LAST_SECONDS
        while self.save() and self.clock.now() < deadline:
            pass
        self._store.close()
        self.executor.close()

    def _bisect(self, batch: Batch) -> None:
        """Plan to run a batch that raised again, in two halves."""
        self._withdraw_dependents(batch)
        # Whether its block copies were made is unknown, and their sources may have been overwritten
        # by now: requests that wait for copies begin again.
        copied = {target for _, target in batch.block_copies}
        items = []
        for item in batch.items:
            if copied.isdisjoint(chain(*item.request.block_tables)):
                items.append(item)
            else:
                self.scheduler.retract(item.request)
        gone = self._report_again(batch)
        middle = (len(items) + 1) // 2
        for part in (items[middle:], items[:middle]):
            if part:
                self._halves.appendleft(Batch(batch.step_id, tuple(part), gone))

    def _withdraw_dependents(self, batch: Batch) -> None:
        """Take the requests of a step that raised out of later ones, which went on from its tokens.

        What those steps write for them is overwritten when they are scheduled again.
        """
        cut = {item.request for item in batch.items}
        for index, submitted in enumerate(self._submitted):
            kept = self._without(submitted.batch, cut)
            if kept is not submitted.batch:
                self._submitted[index] = submitted._replace(batch=kept, is_whole=False)
        self._halves = deque(self._without(later, cut) for later in self._halves)

    def _without(self, batch: Batch, requests: Collection[Request]) -> Batch:
        """Return a batch without the items of some requests, which are then no longer in flight
        in it."""
        kept = tuple(item for item in batch.items if item.request not in requests)
        if len(kept) == batch.num_seqs:
            return batch
        for item in batch.items:
            if item.request in requests:
                self.scheduler.withdraw(item)
        return replace(batch, items=kept)

    def _blame(self, batch: Batch, error: Exception) -> StepOutput:
        """Return the output of a step that raised because of its only request."""
        (item,) = batch.items
        request_id = item.request.request_id
        if not item.request.is_finished:
            _log.error("request %s failed in step %d", request_id, batch.step_id, exc_info=error)
        self._report_again(batch)
        return StepOutput({}, errors={request_id: f"{type(error).__name__}: {error}"})

    def _report_again(self, batch: Batch) -> tuple[str, ...]:
        """Report again which requests left before this step: the executor may not have heard of
        it."""
        return self.scheduler.report_again(batch.finished_ids + batch.preempted_ids)

    def _without_saves(self, batch: Batch) -> Batch:
        """Return a batch without copies to the store: it may have been run in part, and their
        sources may be overwritten."""
        num_blocks = self.scheduler.block_manager.num_blocks
        saves = [copy for copy in batch.block_copies if copy[1] >= num_blocks]
        self._store.settle(saves, are_done=False)
        others = tuple(copy for copy in batch.block_copies if copy[1] < num_blocks)
        return replace(batch, block_copies=others)

    # -- while nothing runs ------------------------------------------------------------------

    def save(self) -> bool:
        """Copy a few blocks to a store that outlives the pool. Returns whether there are more.

        For a loop that has nothing else to do, and for the end: it takes some milliseconds.
        """
        if self.has_unfinished_requests or self._idle_offload.is_done:
            return False
        copies = self._idle_offload.next_copies()
        if not copies:
            if self._idle_offload.is_done:
                return False
            return self._store.has_room or self._store.wait(_STORE_SECONDS)
        return self._copy_to_store(copies)

    def _copy_to_store(self, copies: tuple[tuple[int, int], ...]) -> bool:
        """Make copies to the store now. Returns False if that fails."""
        try:
            self.executor.submit(Batch(self.scheduler.num_steps, (), (), (), copies)).result()
        except PeerEndedError:
            raise
        except Exception:
            _log.exception("cached blocks could not be copied to the store")
            self._store.settle(copies, are_done=False)
            return False
        self._store.settle(copies, are_done=True)
        return True

    def save_prefix(self, request: Request) -> int:
        """Copy the full blocks of a request to the store, between two steps, so that another engine
        can go on from them. Returns the number of tokens whose blocks are there, or on their way.

        Where the store has no room, it is waited for a little, and the rest is not copied.
        """
        blocks = self.scheduler.block_manager
        deadline = self.clock.now() + _SAVE_SECONDS
        copies: list[tuple[int, int]] = []
        num_saved = num_planned = 0
        for number in range(request.num_published_blocks):
            while not self._store.has_room:
                if copies and not self._copy_to_store(tuple(copies)):
                    return num_saved * blocks.block_size
                copies, num_saved = [], num_planned
                if self.clock.now() > deadline or not self._store.wait(_STORE_SECONDS):
                    return num_saved * blocks.block_size
            for table in request.block_tables:
                if table[number] != GONE:
                    copies += blocks.save_if_cached(table[number])
            num_planned += 1
        if not copies or self._copy_to_store(tuple(copies)):
            num_saved = num_planned
        return num_saved * blocks.block_size

    def audit(self) -> bool:
        """Check a part of the block pool while no request runs. Returns whether there is more of
        it.

        For a loop that has delivered everything and has nothing else to do: a part takes about a
        millisecond. Damage is counted and logged, not raised.
        """
        if self.has_unfinished_requests or self._idle_audit.is_done:
            return False
        self._log_violations(self._idle_audit.advance())
        return not self._idle_audit.is_done

    def check_integrity(self) -> None:
        """Check the whole block pool, whatever runs.

        Raises:
            EngineError: it is damaged.
        """
        batches = [submitted.batch for submitted in self._submitted]
        in_flight = {item.request for batch in (*batches, *self._halves) for item in batch.items}
        # Ended requests, too, hold their blocks until the step that they are in is over.
        self.scheduler.block_manager.check_integrity(in_flight.union(self.scheduler.running))

    def _check_counts(self) -> None:
        """Check the counts of blocks after a step. A leak shows when nothing is left to do."""
        blocks = self.scheduler.block_manager
        if not 0 <= blocks.num_cached_blocks <= blocks.num_available_blocks:
            counts = f"{blocks.num_cached_blocks} of {blocks.num_available_blocks}"
            self._log_violations([f"{counts} blocks are cached"])
        if self.has_unfinished_requests:
            return
        if blocks.num_used_blocks:
            self._log_violations([f"{blocks.num_used_blocks} blocks are used by no request"])
        if num_used := blocks.states.num_used:
            self._log_violations([f"{num_used} slots of states are used by no request"])

    def _log_violations(self, violations: list[str]) -> None:
        self.num_invariant_violations += len(violations)
        for violation in violations:
            _log.error("the block pool is damaged, please report this: %s", violation)

    # -- statistics --------------------------------------------------------------------------

    def stats(self) -> StepStats:
        """Return the engine's figures between two steps."""
        return self._stats(Batch(self.scheduler.num_steps, ()), [])

    def _stats(self, batch: Batch, updates: list[RequestUpdate], seconds: float = 0.0) -> StepStats:
        scheduler, blocks = self.scheduler, self.scheduler.block_manager
        drafts, proposer = scheduler.drafts, scheduler.proposer
        return StepStats(
            step_id=batch.step_id,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_due_tokens=_num_due_tokens(scheduler.running),
            num_seqs=batch.num_seqs,
            num_tokens=batch.num_known_tokens + _tokens_of_further_steps(updates),
            num_prompt_tokens=batch.num_prompt_tokens,
            num_preempted=len(batch.preempted_ids),
            num_finished=sum([update.request.is_finished for update in updates]),
            seconds=seconds,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_used_blocks=blocks.num_used_blocks,
            kv_waste=blocks.waste(scheduler.running),
            decode_seconds=scheduler.pacer.decode_seconds,
            prompt_token_seconds=scheduler.pacer.prompt_token_seconds,
            step_seconds=self.step_seconds,
            num_preemptions=scheduler.num_preemptions,
            prefix_tokens_queried=scheduler.prefix_tokens_queried,
            prefix_tokens_hit=scheduler.prefix_tokens_hit,
            num_drafts=drafts.num_drafts,
            draft_tokens=drafts.num_tokens,
            draft_tokens_accepted=drafts.num_accepted,
            draft_seconds=proposer.seconds if proposer is not None else 0.0,
            num_invariant_violations=self.num_invariant_violations,
            draft_accepted_by_position=tuple(drafts.accepted_by_position),
            **self.constraints.figures,
            **self._store.figures,
            **self._meter.figures,
        )


def _split_isolated(batch: Batch) -> list[Batch]:
    """Split a batch into one for each isolated prompt, and one for the rest.

    Block copies are between samples of one prompt, or from the store, so each goes with the
    requests that wait for it. Copies to the store, and the ids of departed requests, go with the
    first batch.
    """
    parts: dict[str, list[ScheduledRequest]] = {}
    for item in batch.items:
        leader = item.request.fork_of or item.request
        parts.setdefault(leader.request_id if leader.isolated else "", []).append(item)
    if len(parts) < 2:
        return [batch]
    batches = []
    for items in parts.values():
        blocks = {
            block_id for item in items for table in item.request.block_tables for block_id in table
        }
        copies = tuple(copy for copy in batch.block_copies if copy[1] in blocks)
        batches.append(Batch(batch.step_id, tuple(items), block_copies=copies))
    of_others = {copy for part in batches[1:] for copy in part.block_copies}
    batches[0] = replace(
        batches[0],
        finished_ids=batch.finished_ids,
        preempted_ids=batch.preempted_ids,
        block_copies=tuple(copy for copy in batch.block_copies if copy not in of_others),
    )
    return batches


def _num_due_tokens(running: Iterable[Request]) -> int:
    """Return the tokens still to be computed of prompts under way, and of requests computed
    again. The last known token does not count, since every decoding request has one to compute."""
    return sum([due - 1 for each in running if (due := each.num_uncomputed_tokens) > 1])


def _num_multi_steps(batch: Batch, updates: Sequence[RequestUpdate]) -> int:
    """Return how many tokens a request alone decoded in a step: it may have ended before those
    planned."""
    return max(1, len(updates[0].new_token_ids)) if batch.num_multi_steps > 1 and updates else 1


def _tokens_of_further_steps(updates: Iterable[RequestUpdate]) -> int:
    return sum([len(tokens) - 1 for update in updates if len(tokens := update.new_token_ids) > 1])
