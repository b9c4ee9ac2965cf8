"""Which tokens of which requests the next step computes, and what its results mean.

There is no prefill phase and no decode phase. Each step has one budget of tokens and hands them
out so that every request's computed tokens catch up with its known tokens: one token for a
request that decodes, a chunk for one whose prompt is under way, nothing for what the prefix cache
already holds, everything again for one that was preempted. The idea is vLLM's (V1 scheduler).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from octavo import faults
from octavo.core.admission import AdmissionPolicy, ContinuousAdmission
from octavo.core.batch import Batch, ScheduledRequest, StepOutput, TokenLogprobs
from octavo.core.block_manager import BlockManager
from octavo.core.request import FinishReason, Request, RequestStatus
from octavo.errors import ConfigError, InvalidRequestError, PromptTooLongError, QueueFullError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler.

    Args:
        max_num_batched_tokens: the token budget of a step.
        max_num_seqs: requests that run at once.
        max_model_len: prompt and output tokens of a request together.
        enable_chunked_prefill: a prompt may be spread over steps. Without it, every prompt has to
            fit the budget.
        max_queued_requests, max_queued_tokens: bounds of the waiting queue; None is no bound.
        max_rounds: tokens that a request which is alone may decode in one step.
        ageing_steps: waiting this many steps counts as much as one level of priority, so that no
            priority can starve another.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 8192
    enable_chunked_prefill: bool = True
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_rounds: int = 1
    ageing_steps: int = 128

    def __post_init__(self) -> None:
        for field in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "max_rounds",
            "ageing_steps",
        ):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, not {getattr(self, field)}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill, max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"must be at least max_model_len ({self.max_model_len}): raise the one, lower the "
                "other, or enable chunked prefill"
            )


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one step brought for one request. Its state is read from ``request``."""

    request: Request
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


class Scheduler:
    """Owns the state of all requests. ``schedule`` decides, ``update`` draws the consequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        admission: AdmissionPolicy | None = None,
    ):
        self.config = config
        self.block_manager = block_manager
        self.admission: AdmissionPolicy = admission or ContinuousAdmission()
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # sorted by queue_key
        self.running: list[Request] = []  # in order of admission
        self.num_waiting_tokens = 0
        self.num_preemptions = 0
        self.prefix_tokens_queried = 0
        self.prefix_tokens_hit = 0
        self._step_id = 0
        self._num_added = 0
        self._finished_ids: list[str] = []

    # -- the door ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, or refuse it at once if it could never be served.

        Raises:
            InvalidRequestError: the prompt is empty or the id is in use.
            PromptTooLongError: it needs more tokens than the context or the pool can hold.
            QueueFullError: the waiting queue is at its bound.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(f"{request.request_id!r} is in use", "request_id")
        request.max_total_tokens = self._total_tokens_of(request)
        config = self.config
        if config.max_queued_requests is not None and (
            len(self.waiting) >= config.max_queued_requests
        ):
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already")
        if config.max_queued_tokens is not None and (
            self.num_waiting_tokens + len(request.token_ids) > config.max_queued_tokens
        ):
            raise QueueFullError(f"{self.num_waiting_tokens} tokens are waiting already")
        # Waiting improves all keys alike, so an aged order needs no clock and no re-sorting: a
        # level of priority is worth ageing_steps steps of arrival time.
        key = request.priority * config.ageing_steps + self._step_id
        request.queue_key = (key, self._num_added)
        self._num_added += 1
        self.requests[request.request_id] = request
        self._enqueue(request)

    def _total_tokens_of(self, request: Request) -> int:
        """Tokens at which the request ends by length; raises if that can never be reached."""
        blocks = self.block_manager
        return total_tokens_of(
            request.num_prompt_tokens,
            request.params.max_tokens,
            self.config.max_model_len,
            blocks.num_blocks * blocks.block_size,
        )

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request from outside, in any state. Unknown and ended ids are no error.

        Blocks of a request that is in flight are still being written; they return to the pool
        when that step ends.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason)
        return request

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
        if not request.in_flight:
            self.block_manager.free(request)

    def retract(self, request: Request) -> None:
        """Take a request out of a step that raised, to be computed anew from its first token."""
        request.in_flight = False
        if request.is_finished:
            self.block_manager.free(request)
            return
        request.fork_of = None  # from a fork it would come back as it is now
        self._preempt(request)
        self.report_again([request.request_id])

    def report_again(self, request_ids: Iterable[str]) -> None:
        """Name these as finished in the next batch too: the last one may not have got through."""
        self._finished_ids.extend(request_ids)

    # -- schedule ----------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Decide the next step.

        1. Running requests, those that decode first, so that none waits behind a prompt. One that
           needs a block when none is left preempts the cheapest request that comes after it.
        2. Then waiting requests in queue order, while budget, seats and blocks last, and only if
           nobody had to be preempted. The first that does not fit ends the admission: nobody is
           overtaken for being big. An admitted request gets the blocks of all its known tokens at
           once, so it will produce a token before it can be preempted.
        """
        planned: dict[Request, ScheduledRequest] = {}
        preempted: list[str] = []
        short_of_blocks = False
        budget = self.config.max_num_batched_tokens
        if faults.hit("scheduler.preempt"):
            preempted += self._preempt_for_no_reason()
        for request in self._running_in_order():
            num_tokens = self._chunk(request, budget)
            if num_tokens == 0 or request.status is not RequestStatus.RUNNING:
                continue  # nothing left to give, or preempted a moment ago
            has_room, victims = self._make_room(request, request.num_computed_tokens + num_tokens)
            for victim in victims:
                preempted.append(victim.request_id)
                if victim in planned:
                    budget += planned.pop(victim).num_tokens
            if has_room:
                start = request.num_computed_tokens
                planned[request] = ScheduledRequest(request, start, num_tokens)
                budget -= num_tokens
            short_of_blocks |= not has_room or bool(victims)
        if not short_of_blocks:
            for item in self._admit(budget):
                planned[item.request] = item
                budget -= item.num_tokens

        max_rounds = self._max_rounds(planned.values())  # before the copies: it takes slots too
        batch = Batch(
            self._step_id,
            tuple(planned.values()),
            tuple(self._finished_ids),
            tuple(preempted),
            self.block_manager.take_copies(),
            max_rounds,
        )
        self._step_id += 1
        self._finished_ids.clear()
        for item in batch.items:
            item.request.in_flight = True
        assert 0 <= budget == self.config.max_num_batched_tokens - batch.num_tokens
        assert len(self.running) <= self.config.max_num_seqs
        return batch

    def _max_rounds(self, planned: Collection[ScheduledRequest]) -> int:
        """How many tokens may be decoded at once, with slots for them: see ``Batch.max_rounds``.

        Only while nobody else is there, who would have to wait for it; and without stop strings,
        because whether a text contains one is only known between steps.
        """
        if self.config.max_rounds == 1 or len(self.requests) != 1 or len(planned) != 1:
            return 1
        (item,) = planned
        request = item.request
        if request.num_uncomputed_tokens != 1 or request.params.stop:
            return 1
        rounds = min(self.config.max_rounds, request.max_total_tokens - len(request.token_ids))
        has_slots = self.block_manager.allocate(request, len(request.token_ids) + rounds - 1)
        return rounds if has_slots else 1

    def _running_in_order(self) -> list[Request]:
        """Those that need a single token first; within that, in order of admission."""
        ready = [request for request in self.running if not request.in_flight]
        decoding = [request for request in ready if request.num_uncomputed_tokens == 1]
        if len(decoding) == len(ready):
            return decoding
        return decoding + [request for request in ready if request.num_uncomputed_tokens > 1]

    def _chunk(self, request: Request, budget: int) -> int:
        """How many tokens of a request a budget pays for."""
        missing = request.num_uncomputed_tokens
        if missing <= budget:
            return missing
        return budget if self.config.enable_chunked_prefill else 0

    def _make_room(self, request: Request, num_tokens: int) -> tuple[bool, list[Request]]:
        """Allocate slots up to ``num_tokens``, preempting where it must. Also returns whom."""
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
        """Whose blocks to take: of those behind ``request``, who has least to compute again.

        Whoever comes first in queue order can take from all others and lose to none, so it ends
        in bounded time, and then the next one does: nothing starves. A request that has not
        produced a token since its admission is spared, so every preemption is paid for with
        progress; None then means to wait for it. The last in order can only preempt itself.
        """
        behind = [other for other in self.running if other.queue_key > request.queue_key]
        if not behind:
            return request
        return min(
            (
                other
                for other in behind
                if not other.in_flight and len(other.token_ids) > other.num_tokens_at_admission
            ),
            key=lambda other: (other.num_computed_tokens, -other.queue_key[1]),
            default=None,
        )

    def _preempt(self, request: Request) -> None:
        assert not request.in_flight
        self.running.remove(request)
        self.block_manager.free(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.stats.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)

    def _preempt_for_no_reason(self) -> list[str]:
        """The fault that shows that preemption changes no answer."""
        for request in self.running:
            if not request.in_flight and len(request.token_ids) > request.num_tokens_at_admission:
                self._preempt(request)
                return [request.request_id]
        return []

    # -- admission ---------------------------------------------------------------------------

    def _admit(self, budget: int) -> Iterator[ScheduledRequest]:
        """Move waiting requests to the running ones and yield their first chunks."""
        for request in self.waiting.copy():
            if budget == 0 or len(self.running) >= self.config.max_num_seqs:
                return
            if not self.admission.may_admit(self.running):
                return
            if _awaits_fork(request):
                continue
            shared_blocks, num_shared = self._shared_prefix(request)
            num_tokens = len(request.token_ids)
            if not self.config.enable_chunked_prefill and num_tokens - num_shared > budget:
                return
            # One block for each running request, lest the newcomer is thrown out at once.
            headroom = len(self.running)
            if not self.block_manager.admit(
                request, shared_blocks, num_shared, num_tokens, headroom
            ):
                return
            self._dequeue(request)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_tokens_at_admission = num_tokens
            if request.num_preemptions == 0:
                request.stats.num_cached_tokens = num_shared
                self.prefix_tokens_queried += num_tokens
                self.prefix_tokens_hit += num_shared
            chunk = self._chunk(request, budget)
            budget -= chunk
            yield ScheduledRequest(request, num_shared, chunk)

    def _shared_prefix(self, request: Request) -> tuple[list[int], int]:
        """Blocks that hold the KV of the request's first tokens, and of how many tokens.

        From the prefix cache, or from the request it forks from, whichever has more. The last
        known token is always computed, because its logits are needed.
        """
        if request.params.prompt_logprobs is not None and (
            request.num_prompt_logprobs < request.num_prompt_tokens - 1
        ):
            return [], 0  # every prompt position has to be computed to be reported
        cached = self.block_manager.match(request, limit=len(request.token_ids) - 1)
        num_cached = len(cached) * self.block_manager.block_size
        source = request.fork_of
        if source is not None and source.status is RequestStatus.RUNNING:
            num_forked = min(source.num_computed_tokens, request.num_prompt_tokens - 1)
            if num_forked > num_cached:
                return source.block_ids[: self.block_manager.blocks_for(num_forked)], num_forked
        return cached, num_cached

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda other: other.queue_key)
        self.num_waiting_tokens += len(request.token_ids)

    def _dequeue(self, request: Request) -> None:
        self.waiting.remove(request)
        self.num_waiting_tokens -= len(request.token_ids)

    # -- update ------------------------------------------------------------------------------

    def update(self, batch: Batch, output: StepOutput) -> list[RequestUpdate]:
        """Take in the results of a step: tokens, published blocks, requests that end."""
        updates: list[RequestUpdate] = []
        for item in batch.items:
            request = item.request
            request.in_flight = False
            if request.is_finished:  # aborted in the meantime; its blocks were still written to
                self.block_manager.free(request)
                continue
            request_id = request.request_id
            if request_id in output.errors:
                # What this step computed is not published: it may be damaged.
                request.error = output.errors[request_id]
                self._finish(request, FinishReason.ERROR)
                updates.append(RequestUpdate(request, [], [], []))
                continue
            request.num_computed_tokens += item.num_tokens
            self.block_manager.commit(request)
            prompt_logprobs = output.prompt_logprobs.get(request_id, [])
            request.num_prompt_logprobs += len(prompt_logprobs)
            new_token_ids = self._append(request, output.token_ids.get(request_id, ()))
            if new_token_ids or prompt_logprobs:
                logprobs = output.logprobs.get(request_id, [])[: len(new_token_ids)]
                updates.append(RequestUpdate(request, new_token_ids, logprobs, prompt_logprobs))
        return updates

    def _append(self, request: Request, token_ids: Iterable[int]) -> list[int]:
        """Append sampled tokens up to the first that ends the request; returns those taken."""
        taken: list[int] = []
        params = request.params
        for token_id in token_ids:
            if taken:  # then the executor went on to compute the one before
                request.num_computed_tokens += 1
                self.block_manager.commit(request)
            request.token_ids.append(token_id)
            taken.append(token_id)
            if request.num_output_tokens >= params.min_tokens:
                if not params.ignore_eos and token_id in request.eos_token_ids:
                    self._finish(request, FinishReason.STOP)
                    break
                if token_id in params.stop_token_ids:
                    self._finish(request, FinishReason.STOP, token_id)
                    break
            if len(request.token_ids) >= request.max_total_tokens:
                self._finish(request, FinishReason.LENGTH)
                break
        request.stats.num_output_tokens = request.num_output_tokens
        return taken


def total_tokens_of(
    num_prompt: int, max_tokens: int | None, max_model_len: int, pool_tokens: int
) -> int:
    """Tokens at which a request ends by length.

    Raises:
        InvalidRequestError: the prompt is empty.
        PromptTooLongError: the context, or a pool of so many slots, can never hold it.
    """
    if num_prompt == 0:
        raise InvalidRequestError("is empty: there is nothing to continue", "prompt")
    # The last token is sampled and never computed, so it needs no slot.
    for limit, what, remedy in (
        (max_model_len, "context", "raise max_model_len if the model allows it"),
        (pool_tokens + 1, "KV pool", "raise num_blocks or kv_cache_memory"),
    ):
        if num_prompt + 1 > limit:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens and the {what} holds {limit}, one of "
                f"them to be generated: shorten the prompt or {remedy}",
                num_prompt,
                limit,
            )
        if max_tokens is not None and num_prompt + max_tokens > limit:
            raise PromptTooLongError(
                f"prompt ({num_prompt} tokens) + max_tokens ({max_tokens}) exceed the "
                f"{limit} tokens of the {what}: lower max_tokens to {limit - num_prompt}, "
                f"leave it None, or {remedy}",
                num_prompt,
                limit,
            )
    total = min(max_model_len, pool_tokens + 1)
    return total if max_tokens is None else num_prompt + max_tokens


def _awaits_fork(request: Request) -> bool:
    """Whether the prompt that a request shares is still being computed by another request."""
    source = request.fork_of
    return (
        source is not None
        and not source.is_finished
        and source.num_computed_tokens < request.num_prompt_tokens - 1
    )
