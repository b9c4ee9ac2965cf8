"""Chooses the tokens that the next step computes, and updates requests with its results.

There is no prefill phase and no decode phase. Each step has one budget of tokens and hands them out
so that every request's computed tokens catch up with its known tokens: one token for a request that
decodes, a chunk for one whose prompt is under way, nothing for what the prefix cache already holds,
everything again for one that was preempted. The idea is vLLM's (V1 scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from octavo.base.errors import ConfigError, InvalidRequestError
from octavo.core.adapters import Adapters, AdapterState, NoAdapters
from octavo.core.admission import AdmissionPolicy, ContinuousAdmission
from octavo.core.batch import (
    NO_TOKEN_LEFT,
    Batch,
    ScheduledRequest,
    StepOutput,
    TokenLogprobs,
)
from octavo.core.block_manager import SharedPrefix
from octavo.core.block_pools import Blocks
from octavo.core.drafting import DraftProposer
from octavo.core.fair_queue import FairQueue, behind
from octavo.core.limits import (
    QueueLimits,
    RequestWork,
    WorkBudget,
    check_sink_window,
    pooled_tokens_of,
    total_tokens_of,
)
from octavo.core.lookahead import Lookahead
from octavo.core.prefill_pacing import Pacer
from octavo.core.prefix_cache import MissReason
from octavo.core.request import FinishReason, Request, RequestStatus
from octavo.core.sink_window import SinkWindowRules
from octavo.core.stats import DraftStats
from octavo.core.step_share import StepShare, WholeShare


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler.

    Args:
        max_num_batched_tokens: the token budget of a step.
        max_num_seqs: requests that run at once.
        max_model_len: prompt and output tokens of a request together.
        enable_chunked_prefill: a prompt may be spread over steps. Without it, every prompt has to
            fit the budget.
        max_queued_requests, max_queued_tokens: bounds of the waiting queue, whose requests count
            with all tokens that they may come to have (``RequestWork``); None is no bound.
        target_step_seconds: the longest that a step should take while a request decodes: prompts
            are cut into chunks that keep to it (``core/prefill_pacing.py``). 0 is no bound.
        max_multi_steps: tokens that a request which is alone may decode in one step.
        runs_ahead: a request may be in several steps at once: with chunks of its prompt that follow
            each other, and with tokens where it ``is_fed`` (see ``Executor.feeds_tokens``).
        ageing_steps: waiting this many steps counts as much as one level of priority, so that no
            priority can starve another.
        max_priority: levels above and below 0. Beyond them a priority counts as the last level, so
            that no request is overtaken by one that comes more than
            2 x max_priority x ageing_steps steps later.
        sink_windows: which of their own tokens requests attend to.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 8192
    enable_chunked_prefill: bool = True
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    target_step_seconds: float = 0.0
    max_multi_steps: int = 1
    runs_ahead: bool = False
    ageing_steps: int = 128
    max_priority: int = 64
    sink_windows: SinkWindowRules = field(default_factory=SinkWindowRules)

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "max_multi_steps",
            "ageing_steps",
            "max_priority",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        self.sink_windows.check(self.max_model_len)
        if self.target_step_seconds < 0:
            raise ConfigError(
                f"target_step_seconds must be at least 0, not {self.target_step_seconds}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill, max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"must be at least max_model_len ({self.max_model_len}): raise the one, lower the "
                "other, or enable chunked prefill"
            )


@dataclass(slots=True)  # not frozen, for the reason that ScheduledRequest is not
class RequestUpdate:
    """The tokens that one step brought for one request. Its state is read from ``request``."""

    request: Request
    new_token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    pooled: Any = None  # see ``StepOutput``


class Scheduler:
    """Owns the state of all requests. ``schedule`` plans a step, ``update`` applies its results."""

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: Blocks,
        admission: AdmissionPolicy | None = None,
        proposer: DraftProposer | None = None,
        share: StepShare | None = None,
        adapters: Adapters | None = None,
    ):
        assert proposer is None or not block_manager.states.exist, "a state is not taken back"
        self.config = config
        self.share: StepShare = share or WholeShare()
        self.block_manager: Blocks = block_manager
        self.admission: AdmissionPolicy = admission or ContinuousAdmission()
        self.adapters: Adapters = adapters or NoAdapters()
        self.proposer = proposer
        self.lookahead = Lookahead(
            block_manager, config.max_multi_steps, proposer, runs_ahead=config.runs_ahead
        )
        # Without chunks there is nothing to pace.
        self.pacer = Pacer(config.target_step_seconds if config.enable_chunked_prefill else 0.0)
        # Waiting requests, as limits count them, and in their order.
        limits = QueueLimits(config.max_queued_requests, config.max_queued_tokens)
        self.queued_work = WorkBudget(limits)
        self.waiting: FairQueue[Request] = FairQueue()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self.prefix_tokens_queried = 0
        self.prefix_tokens_hit = 0
        self.drafts = DraftStats()
        self.num_steps = 0
        self._num_added = 0
        self._finished_ids: list[str] = []
        self._is_short_of_blocks = False  # in the last step

    # -- add and end -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, or refuse it at once if it could never be served.

        Raises:
            InvalidRequestError: the prompt is empty or could not wait in any queue, or the id is in
                use.
            PromptTooLongError: it needs more tokens than the context or the pool can hold.
            QueueFullError: the waiting queue is at its bound.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(f"{request.request_id!r} is in use", "request_id")
        request.sink_window = self.config.sink_windows.of(request.params, self.config.max_model_len)
        request.max_total_tokens = self._total_tokens_of(request)
        config, work = self.config, RequestWork(1, request.max_total_tokens)
        self.queued_work.limits.check(work)
        self.queued_work.check(request.tenant, work)
        # Waiting improves all keys alike, so an aged order needs no clock and no re-sorting: a
        # level of priority is worth ageing_steps steps of arrival time.
        level = max(-config.max_priority, min(config.max_priority, request.priority))
        key = level * config.ageing_steps + self.num_steps
        request.queue_key = (key, self._num_added)
        self._num_added += 1
        self.requests[request.request_id] = request
        self._enqueue(request)

    def _total_tokens_of(self, request: Request) -> int:
        """Return the number of tokens at which the request ends by length; raises if that can
        never be reached."""
        config, blocks = self.config, self.block_manager
        longest = blocks.longest_sequence(config.max_num_batched_tokens, config.max_model_len)
        if request.pooling is not None:
            return pooled_tokens_of(request.num_prompt_tokens, config.max_model_len, longest)
        num_tokens = total_tokens_of(
            request.num_prompt_tokens,
            request.params.max_tokens,
            config.max_model_len,
            longest,
            request.sink_window,
        )
        if request.sink_window is not None:
            if not config.enable_chunked_prefill:
                raise InvalidRequestError(
                    "needs chunked prefill: after a preemption, all that was generated is a prompt",
                    "window",
                )
            check_sink_window(
                request.sink_window,
                num_tokens,
                blocks.num_blocks,
                blocks.block_size,
                config.max_num_batched_tokens,
            )
        return num_tokens

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request from outside, in any state. Unknown and ended ids are no error.

        Blocks of a request that is in flight are still being written; they return to the pool when
        that step ends.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason)
        return request

    def stop(self, request: Request, stop_reason: str, num_output_tokens: int) -> None:
        """End a request at a stop string, which its first ``num_output_tokens`` tokens complete.

        It may have ended in the same step already: at its length, or at a token further on.
        """
        del request.token_ids[request.num_prompt_tokens + num_output_tokens :]
        self.finish(request.request_id, FinishReason.STOP, stop_reason)
        request.finish_reason, request.stop_reason = FinishReason.STOP, stop_reason
        request.stats.num_output_tokens = request.num_output_tokens

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        if request.status is RequestStatus.WAITING:
            self._dequeue(request)
        else:
            self.running.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.fork_of = None
        del self.requests[request.request_id]
        self._finished_ids.append(request.request_id)
        self._forget_drafts(request)
        if not request.num_tokens_in_flight:
            self.block_manager.free(request)

    def retract(self, request: Request) -> None:
        """Take a request out of a step that raised, to be computed again from its first token."""
        request.num_tokens_in_flight = request.num_awaited_tokens = 0
        if request.is_finished:
            self.block_manager.free(request)
            return
        request.fork_of = None  # a fork would bring back the blocks that it has now
        self._preempt(request)
        self.report_again([request.request_id])

    def withdraw(self, item: ScheduledRequest) -> None:
        """Forget that an item was submitted: the step that it went on from raised."""
        item.request.num_tokens_in_flight -= item.num_tokens
        item.request.num_awaited_tokens -= item.num_sampled == 1
        self.block_manager.states.withdraw(item.request)

    def report_again(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Name these requests as finished in the next batch too: the last one may not have got
        through.

        Requests that were admitted in the meantime are left out. Returns the others.
        """
        gone = tuple(request_id for request_id in request_ids if not self._is_running(request_id))
        self._finished_ids.extend(gone)
        return gone

    def _is_running(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.status is RequestStatus.RUNNING

    # -- schedule ----------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Plan the next step.

        1. Running requests, those that decode first, so that none waits behind a prompt. One that
           needs a block when none is left preempts the cheapest request that comes after it.
           One whose last step has not ended yet runs ahead of it, if its next token is certain.
        2. Then waiting requests, in the order of their queue, while budget, slots and blocks last,
           and only if no request had to be preempted. The first that does not fit ends the
           admission: no request is overtaken for being large. An admitted request gets the blocks
           of all its known tokens at once, so it will produce a token before it can be preempted.
           (Those of windows come chunk by chunk: see ``_cheapest_victim``.)
        """
        planned: dict[Request, ScheduledRequest] = {}
        preempted: list[str] = []
        short_of_blocks = False
        decoding, prompts = self._ready()
        budget = self._budget(len(decoding), prompts)
        for request in chain(decoding, prompts):
            item = self._next_item(request, budget)
            if item is None:
                continue  # nothing left to give
            if short_of_blocks and request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago
            end = item.start + item.num_tokens
            has_room = self.block_manager.allocate(request, end)
            if not has_room:
                short_of_blocks = True
                has_room, victims = self._make_room(request, end)
                for victim in victims:
                    preempted.append(victim.request_id)
                    if victim in planned:
                        budget += planned.pop(victim).num_tokens
            if has_room:
                planned[request] = item
                budget -= item.num_tokens
        if not short_of_blocks:
            for item in self._admit(budget):
                planned[item.request] = item
                budget -= item.num_tokens

        self._is_short_of_blocks = short_of_blocks
        is_alone = len(self.requests) == 1
        items = self.block_manager.in_order(planned.values())
        batch = Batch(
            self.num_steps,
            self.lookahead.plan(items, budget, is_alone=is_alone),
            tuple(self._finished_ids),
            tuple(preempted),
            self.block_manager.take_copies(),
        )
        self.num_steps += 1
        self._finished_ids.clear()
        begin = self.block_manager.states.begin
        for item in batch.items:
            request = item.request
            item.states = begin(request)
            request.num_tokens_in_flight += item.num_tokens
            if item.num_sampled == 1:
                request.num_awaited_tokens += 1
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        assert len(self.running) <= self.config.max_num_seqs
        return batch

    def _budget(self, num_decoding: int, prompts: Sequence[Request]) -> int:
        """Return the tokens of the next step: fewer, where a large chunk would delay decoding
        requests, or leave nothing for the other stages of a pipeline."""
        most_of_prompts = self.pacer.prompt_tokens(num_decoding)
        if self.config.enable_chunked_prefill:
            share = self.share.prompt_tokens(prompts, self.waiting.num_tokens)
            most_of_prompts = min(most_of_prompts, share)
        return int(min(self.config.max_num_batched_tokens, num_decoding + most_of_prompts))

    def _ready(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """Return the running requests that a step takes: its share of those that need a single
        token, and those that need more. Both in order of admission.

        Requests that run ahead come after those of their kind that are in no step. None runs ahead
        while blocks are short, because only requests that are not in flight can be preempted.
        """
        ready = [request for request in self.running if not request.num_tokens_in_flight]
        if self.lookahead.runs_ahead and not self._is_short_of_blocks:
            in_flight = (request for request in self.running if request.num_tokens_in_flight)
            ready += filter(self.lookahead.may_run_ahead, in_flight)
        prompts: list[Request] = []
        decoding = [request for request in ready if request.num_uncomputed_tokens == 1]
        if len(decoding) < len(ready):
            prompts = [request for request in ready if request.num_uncomputed_tokens > 1]
        return self.share.decoding(decoding, self.running), prompts

    def _next_item(self, request: Request, budget: int) -> ScheduledRequest | None:
        """Return the next tokens of a request that a budget pays for, None if there are none.

        A token is sampled if they include its last known one.
        """
        start = request.num_computed_tokens + request.num_tokens_in_flight
        missing = len(request.token_ids) + request.num_awaited_tokens - start
        num_tokens = min(missing, budget)
        if self.config.enable_chunked_prefill:
            num_tokens = self.block_manager.states.cut(request, start, num_tokens)
        elif num_tokens < missing:
            return None
        if num_tokens == 0:
            return None
        is_sampled = num_tokens == missing and request.pooling is None
        return ScheduledRequest(request, start, num_tokens, int(is_sampled))

    def _make_room(self, request: Request, num_tokens: int) -> tuple[bool, list[Request]]:
        """Allocate slots up to ``num_tokens``, preempting where it must. Also returns the
        preempted requests."""
        victims: list[Request] = []
        while not self.block_manager.allocate(request, num_tokens):
            victim = self._cheapest_victim(request)
            if victim is None:
                return False, victims
            self._preempt(victim)
            victims.append(victim)
            if victim is request:
                return False, victims
        return True, victims

    def _cheapest_victim(self, request: Request) -> Request | None:
        """Return the request whose blocks to take: of those ``behind`` a request, the one with the
        fewest tokens to compute again.

        The first request in that order can take from all others and lose to none, so it ends in
        bounded time, and then the next one does: nothing starves. A request that has not produced a
        token since its admission is spared, so every preemption is paid for with progress; None
        then means to wait for it. The last in order can only preempt itself.

        With windows, or sink windows, a prompt may need blocks before it has produced anything: if
        all that come after would be spared, none is, except those in flight.
        """
        others = self.block_manager.rivals(request, behind(request, self.running))
        if not others:
            return None if request.num_tokens_in_flight else request
        victims = [other for other in others if self.may_preempt(other)]
        if not victims and (
            self.block_manager.has_windows
            or any(other.sink_window is not None for other in (request, *others))
        ):
            # Blocks of windows come chunk by chunk, so a request in the middle of a prompt may have
            # to wait for others in the middle of theirs.
            victims = [other for other in others if not other.num_tokens_in_flight]
        return min(
            victims,
            key=lambda other: (other.num_computed_tokens, -other.queue_key[1]),
            default=None,
        )

    def may_preempt(self, request: Request) -> bool:
        """Return whether its blocks may be taken: not in flight, and not before it has made
        progress."""
        return not request.num_tokens_in_flight and (
            len(request.token_ids) > request.num_tokens_at_admission
        )

    def _preempt(self, request: Request) -> None:
        assert not request.num_tokens_in_flight
        self.running.remove(request)
        self.block_manager.free(request)
        self._forget_drafts(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.stats.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)

    # -- admission ---------------------------------------------------------------------------

    def _admit(self, budget: int) -> Iterator[ScheduledRequest]:
        """Move waiting requests to the running ones and yield their first chunks."""
        max_num_seqs = self.config.max_num_seqs
        if budget == 0 or len(self.running) >= max_num_seqs:
            return
        adapters_are_full = False
        for request in self.waiting.in_order():
            if budget == 0 or len(self.running) >= max_num_seqs:
                return
            if not self.admission.may_admit(self.running):
                return
            if self._awaits_fork(request):
                continue
            if (adapter := request.adapter) is not None:
                state = AdapterState.FULL
                if not adapters_are_full:
                    state = self.adapters.ask(adapter, self.running)
                if state is not AdapterState.READY:
                    adapters_are_full |= state is AdapterState.FULL
                    continue
            shared = self.block_manager.place(request, self.running, self._shared_prefix)
            if shared.stored.is_awaited:
                continue
            num_shared, num_tokens = shared.num_tokens, len(request.token_ids)
            if not self.config.enable_chunked_prefill and num_tokens - num_shared > budget:
                return
            headroom = self.block_manager.headroom(request, self.running)
            if not self.block_manager.admit(request, shared, num_tokens, headroom, budget):
                return
            # Preempted requests have paid for the tokens that are computed again.
            self.waiting.admit(request, 0 if request.num_preemptions else num_tokens - num_shared)
            self.queued_work.give_back(request.tenant, RequestWork(1, request.max_total_tokens))
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_tokens_at_admission = num_tokens
            if request.num_preemptions == 0:
                request.stats.num_cached_tokens = num_shared
                request.stats.miss_reason = self._miss_reason(request, num_shared).value
                self.prefix_tokens_queried += num_tokens
                self.prefix_tokens_hit += num_shared
                self.block_manager.count_hit(request)
            item = self._next_item(request, budget)
            assert item is not None  # some of the budget is left, or all of it fits
            budget -= item.num_tokens
            yield item

    def _shared_prefix(self, request: Request) -> SharedPrefix:
        """Return blocks that hold the KV of the request's first tokens.

        They come from the prefix cache, or from the request it forks from, whichever has more. The
        last known token is always computed, because its logits are needed.
        """
        if _needs_whole_prompt(request):
            return self.block_manager.nothing_shared
        cached = self.block_manager.match(request, limit=len(request.token_ids) - 1)
        source = request.fork_of
        if (
            source is not None
            and source.status is RequestStatus.RUNNING
            and source.pool == request.pool
        ):
            num_forked = min(source.num_computed_tokens, request.num_prompt_tokens - 1)
            if num_forked >= cached.num_tokens:  # if equal, forked blocks: they need no copies
                forked = self.block_manager.fork(source, num_forked)
                return max(forked, cached, key=lambda shared: shared.num_tokens)
        return cached

    def _miss_reason(self, request: Request, num_shared: int) -> MissReason:
        """Return the reason why no more of its tokens were shared."""
        if _needs_whole_prompt(request):
            return MissReason.PROMPT_LOGPROBS if request.pooling is None else MissReason.POOLING
        limit = len(request.token_ids) - 1
        return self.block_manager.why_no_more(request, num_shared, limit)

    def _awaits_fork(self, request: Request) -> bool:
        """Return whether the prompt that a request shares is still being computed, or restored
        from the store."""
        source = request.fork_of
        if source is None or source.is_finished:
            return False
        is_known = self.block_manager.is_published(source)
        return not is_known or source.num_computed_tokens < request.num_prompt_tokens - 1

    def _enqueue(self, request: Request) -> None:
        self.waiting.add(request)
        self.queued_work.take(request.tenant, RequestWork(1, request.max_total_tokens))

    def _dequeue(self, request: Request) -> None:
        self.waiting.remove(request)
        self.queued_work.give_back(request.tenant, RequestWork(1, request.max_total_tokens))

    # -- update ------------------------------------------------------------------------------

    def update(self, batch: Batch, output: StepOutput) -> list[RequestUpdate]:
        """Apply the results of a step: tokens, published blocks, requests that end."""
        updates: list[RequestUpdate] = []
        commit, token_ids_of = self.block_manager.commit, output.token_ids
        end_of_states = self.block_manager.states.end
        charge, has_waiting = self.waiting.charge, len(self.waiting) > 0
        for item in batch.items:
            request = item.request
            request.num_tokens_in_flight -= item.num_tokens
            if item.num_sampled == 1:
                request.num_awaited_tokens -= 1
            if request.is_finished:  # in the meantime; its blocks were still written to
                if not request.num_tokens_in_flight:
                    self.block_manager.free(request)
                continue
            request_id = request.request_id
            if output.errors and request_id in output.errors:
                # What this step computed is not published: it may be damaged.
                request.error = _explained(output.errors[request_id], request)
                self._finish(request, FinishReason.ERROR)
                updates.append(RequestUpdate(request, []))
                continue
            request.num_computed_tokens = item.end
            end_of_states(request)
            commit(request)
            if request.pooling is not None:
                if request_id in output.pooled:
                    self._finish(request, FinishReason.STOP)
                    updates.append(RequestUpdate(request, [], pooled=output.pooled[request_id]))
                continue
            new_token_ids = self._append(request, token_ids_of.get(request_id, []))
            update = RequestUpdate(request, new_token_ids)
            if output.logprobs:
                update.logprobs = output.logprobs.get(request_id, [])[: len(new_token_ids)]
            if output.prompt_logprobs:
                update.prompt_logprobs = output.prompt_logprobs.get(request_id, ())
                request.num_prompt_logprobs += len(update.prompt_logprobs)
            if has_waiting:
                charge(request, len(new_token_ids))
            if new_token_ids or update.prompt_logprobs:
                updates.append(update)
            if item.num_sampled > 1:
                self._take_back(item, new_token_ids)
        return updates

    def _take_back(self, item: ScheduledRequest, new_token_ids: list[int]) -> None:
        """Give back slots of tokens that a step might have brought, and did not."""
        request, draft = item.request, item.draft
        self.block_manager.trim(request, len(request.token_ids))
        if draft is None:
            return
        num_accepted = len(draft.path(new_token_ids))
        for stats in (self.drafts, request.stats.drafts):
            stats.count(len(draft), num_accepted)
        if self.proposer is not None:
            self.proposer.observe(request, draft, num_accepted)

    def _forget_drafts(self, request: Request) -> None:
        if self.proposer is not None:
            self.proposer.forget(request)

    def _append(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append sampled tokens up to the first that ends the request; returns those appended."""
        num_taken = 0
        params, known = request.params, request.token_ids
        num_output = len(known) - request.num_prompt_tokens
        for token_id in token_ids:
            if num_taken:  # then the executor has computed the one before too
                request.num_computed_tokens += 1
                self.block_manager.commit(request)
            known.append(token_id)
            num_taken += 1
            num_output += 1
            if num_output >= params.min_tokens:
                if not params.ignore_eos and token_id in request.eos_token_ids:
                    self._finish(request, FinishReason.STOP)
                    break
                if token_id in params.stop_token_ids:
                    self._finish(request, FinishReason.STOP, token_id)
                    break
            if len(known) >= request.max_total_tokens:
                self._finish(request, FinishReason.LENGTH)
                break
        request.stats.num_output_tokens = num_output
        return token_ids if num_taken == len(token_ids) else token_ids[:num_taken]


def _needs_whole_prompt(request: Request) -> bool:
    """Return whether every position of a prompt has to be computed, for its log-probabilities or
    for a vector of all."""
    if request.pooling is not None and request.pooling.sees_all:
        return True
    return request.params.prompt_logprobs is not None and (
        request.num_prompt_logprobs < request.num_prompt_tokens - 1
    )


def _explained(error: str, request: Request) -> str:
    """Return an error of a request; where its mask left no token, the problem of that."""
    if error == NO_TOKEN_LEFT and request.mask is not None:
        return request.mask.problem or error
    return error
