"""The work of one HTTP request, which is a generation for each of its prompts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.base.errors import EngineError, InvalidRequestError, OctavoError
from octavo.core.batch import CONSTRAINT_PROBLEM, NO_TOKEN_LEFT, OVERFLOW
from octavo.core.limits import RequestWork
from octavo.core.prefix_cache import MissReason
from octavo.core.sampling_params import SamplingParams, check_prompt_logprobs
from octavo.server.api.requests import GenerationFields
from octavo.server.api.sampling import is_deterministic
from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import (
    Generation,
    GenerationRequest,
    GenerationStats,
)
from octavo.server.http.background import briefly_in_background, in_background
from octavo.server.http.context import request_context
from octavo.server.http.json_text import encode, encode_in_pieces
from octavo.server.http.sse import run_until_disconnect
from octavo.server.http.tenants import RateLimitError
from octavo.server.settings import MAX_SAMPLES
from octavo.serving.outputs import Delta

T = TypeVar("T")

# Entries of an answer, beyond which its JSON is written in the background.
MANY_ENTRIES = 1000
MANY_CHARS = 16 << 10  # of text, likewise: it may be parsed

_IDS_PER_TURN = 1 << 13  # token ids that are checked before the event loop goes on
_MAX_ALLOWED_TOKENS = 1 << 20  # of all prompts together: each is sent to the engine with them


class GenerationJob:
    """The generations of one HTTP request. It must be closed, whatever happens."""

    def __init__(
        self,
        server: ServerContext,
        request: Request,
        fields: GenerationFields,
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ):
        context = request_context(request)
        self._work = _work_of(prompts, params)
        self.params = params
        self._tenant = context.tenant
        self._server = server
        server.engine.check_size(*self._work)
        check_prompt_logprobs(params, params.n * sum(map(len, prompts)))  # each choice has them
        _check_allowed_tokens(params, len(prompts))
        deadline = _deadline(fields.timeout, server.settings.request_timeout, context.arrival_time)
        self._requests = [
            GenerationRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=prompt,
                params=params,
                arrival_time=context.arrival_time,
                priority=context.tenant.priority_of(fields.priority),
                cache_salt="\0".join(filter(None, (context.tenant.salt, fields.cache_salt))),
                deadline=deadline,
                streams=bool(fields.stream),
                is_deterministic=is_deterministic(fields, params),
                external_id=context.external_id,
                route=request.scope["path"],
                tenant=context.tenant.name,
                weight=context.tenant.weight,
                constraint_field=_constraint_field(fields, params),
            )
            for prompt in prompts
        ]
        self._is_charged = False
        self.generations: list[Generation] = []

    async def begin(self) -> GenerationJob:
        """Charge the tenant and queue every prompt, or raise and leave nothing behind.

        Raises:
            RateLimitError, RequestError, EngineUnavailableError, QuarantinedError: as
                `Tenant.charge_tokens` and `EngineClient.submit` do.
        """
        try:
            self._charge()
        except RateLimitError as error:
            self._server.observer.on_rejected(error.reason)
            raise
        try:
            await self._submit_all()
        except BaseException:
            for generation in self.generations:
                generation.close()
            self.generations.clear()  # nothing of them was used: all is refunded
            self.close()
            raise
        return self

    def _charge(self) -> None:
        """Take all of the work from the tenant's limits, or nothing."""
        self._tenant.begin_work(self._work)
        try:
            self._tenant.charge_tokens(self._work.tokens)
        except BaseException:
            self._tenant.end_work(self._work)
            raise
        self._is_charged = True

    async def _submit_all(self) -> None:
        """Submit all prompts, with pauses for the event loop, since every token id is checked."""
        bad_words = await self._server.prompts.words(self.params.bad_words)
        num_ids = 0
        for request in self._requests:
            if num_ids > _IDS_PER_TURN:
                await asyncio.sleep(0)
                num_ids = 0
            self.generations.append(
                self._server.submit(replace(request, bad_words_token_ids=bad_words))
            )
            num_ids += len(request.prompt_token_ids) + len(self.params.allowed_token_ids or ())

    def close(self) -> None:
        """End what still runs, and refund the tokens that were not generated. May be repeated."""
        for generation in self.generations:
            generation.close()
        if not self._is_charged:
            return
        self._is_charged = False
        used = sum(
            self.params.num_samples * generation.stats.num_prompt_tokens
            + generation.stats.num_output_tokens
            for generation in self.generations
        )
        self._tenant.end_work(self._work)
        self._tenant.refund_tokens(max(self._work.tokens - used, 0))

    async def collect(self, request: Request) -> list[list[Delta]]:
        """Return the ``n`` completions of each prompt, the most likely of them where there are
        more. The job is closed.

        Raises:
            HttpError: 499, the client is gone.
        """

        async def collect_all() -> list[list[Delta]]:
            return [_best(await each.collect(), self.params.n) for each in self.generations]

        try:
            return await run_until_disconnect(request, collect_all())
        finally:
            self.close()

    async def write(
        self,
        completions: Sequence[Sequence[Delta]],
        names_tokens: bool,
        function: Callable[..., T],
        *args: Any,
    ) -> T:
        """Return ``function(*args, to_json)``, run where it does not hold up the event loop.

        Args:
            completions: that it writes beside the prompts' log-probabilities.
            names_tokens: whether it needs the tokenizer, and so is never run on the event loop.
        """
        num_chars = sum(len(completion.text) for group in completions for completion in group)
        if _num_entries(self, completions) > MANY_ENTRIES or num_chars > MANY_CHARS:
            return await in_background(function, *args, encode_in_pieces)
        if names_tokens:
            return await briefly_in_background(function, *args, encode)
        return function(*args, encode)

    async def updates(self) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        """Yield the number of a prompt and its new deltas, as they come.

        Unread deltas stay in the generations.
        """
        if len(self.generations) == 1:
            async for deltas in self.generations[0]:
                yield 0, deltas
            return
        waiting = {
            asyncio.ensure_future(_next(generation)): number
            for number, generation in enumerate(self.generations)
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=waiting.__getitem__):
                    number = waiting.pop(future)
                    if (news := future.result()) is not None:
                        waiting[asyncio.ensure_future(_next(self.generations[number]))] = number
                        yield number, news
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    # -- usage and timings -------------------------------------------------------------------

    @property
    def num_pending_chars(self) -> int:
        return sum(generation.num_pending_chars for generation in self.generations)

    @property
    def is_from_cache(self) -> bool:
        """True if nothing had to be computed for any prompt."""
        return all(generation.is_from_cache for generation in self.generations)

    @property
    def cache_headers(self) -> dict[str, str]:
        """The response headers that mark an answer from the cache."""
        return {"x-octavo-cache": "hit"} if self.is_from_cache else {}

    def usage(self, *, counts_output: bool = True) -> dict[str, Any]:
        """Return the ``usage`` object, as it stands."""
        stats = [generation.stats for generation in self.generations]
        num_prompt = sum(each.num_prompt_tokens for each in stats)
        num_output = sum(each.num_output_tokens for each in stats) if counts_output else 0
        found: dict[str, Any] = {"cached_tokens": sum(each.num_cached_tokens for each in stats)}
        if len(stats) == 1 and stats[0].miss_reason:
            found["miss_reason"] = shown_miss_reason(stats[0].miss_reason)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": found,
        }
        if num_drafted := sum(each.num_draft_tokens for each in stats):
            num_accepted = sum(each.num_accepted_tokens for each in stats)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_drafted - num_accepted,
            }
        return usage

    def timings(self) -> dict[str, Any] | None:
        """Return the ``timings`` object; None for several prompts, whose times overlap."""
        if len(self.generations) > 1:
            return None
        return _timings(self.generations[0].stats, self.params.num_samples)


def _work_of(prompts: Sequence[list[int]], params: SamplingParams) -> RequestWork:
    """Return the work of a request; raise InvalidRequestError if it has too many completions."""
    num_samples = len(prompts) * params.num_samples
    if num_samples > MAX_SAMPLES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with {params.num_samples} completions each are "
            f"{num_samples}; a request may ask for {MAX_SAMPLES}",
            "n",
        )
    each = [RequestWork.of(len(prompt), params) for prompt in prompts]
    return RequestWork(num_samples, sum(work.tokens for work in each))


def _check_allowed_tokens(params: SamplingParams, num_prompts: int) -> None:
    num_allowed = len(params.allowed_token_ids or ())
    if num_allowed * num_prompts > _MAX_ALLOWED_TOKENS:
        raise InvalidRequestError(
            f"with {num_prompts} prompts at most {_MAX_ALLOWED_TOKENS // num_prompts} tokens can "
            f"be named, not {num_allowed}: send fewer prompts at once",
            "allowed_token_ids",
        )


def _num_entries(job: GenerationJob, completions: Sequence[Sequence[Delta]]) -> int:
    """Return the number of log-probabilities and choices that an answer will have."""
    num_positions = sum(len(completion.logprobs) for group in completions for completion in group)
    num_positions += sum(len(generation.prompt_logprobs) for generation in job.generations)
    num_top = max(job.params.logprobs or 0, job.params.prompt_logprobs or 0)
    return num_positions * (1 + num_top) + len(completions) * job.params.n


def check_sample(sample: Delta) -> None:
    """Raise an error if a sample ended by neither a stop nor its length."""
    if sample.finish_reason in ("error", "abort"):
        raise sample_error(sample.error)


def sample_error(reason: str | None) -> OctavoError:
    """Return the error for a request whose only sample failed: the request's fault, or the
    engine's."""
    if reason in (NO_TOKEN_LEFT, OVERFLOW):
        return InvalidRequestError(reason)
    if reason is not None and reason.startswith(CONSTRAINT_PROBLEM):
        return InvalidRequestError(reason)
    return EngineError(reason or "no token could be sampled")


async def _next(generation: Generation) -> list[Delta] | None:
    return await anext(generation, None)


def _best(completions: list[Delta], n: int) -> list[Delta]:
    if len(completions) > n:
        completions = sorted(completions, key=_negative_logprob)[:n]
        for index, completion in enumerate(completions):
            completion.index = index
    return completions


def _negative_logprob(completion: Delta) -> float:
    likelihood = completion.cumulative_logprob
    return float("inf") if likelihood is None else -likelihood


def shown_miss_reason(reason: str) -> str:
    """Return the miss reason that a client may see: none that reveals what others have asked."""
    unknown, others = MissReason.NEVER_SEEN.value, MissReason.OTHER_SALT.value
    return unknown if reason == others else reason


def _timings(stats: GenerationStats, num_samples: int) -> dict[str, Any]:
    num_computed = stats.num_prompt_tokens - stats.num_cached_tokens
    num_after_first = stats.num_output_tokens - num_samples
    timings = {
        "cache_n": stats.num_cached_tokens,
        "prompt_n": num_computed,
        **_rates("prompt", stats.prefill_time, num_computed),
        "predicted_n": stats.num_output_tokens,
        **_rates("predicted", stats.decode_time, num_after_first),
    }
    if stats.num_draft_tokens:
        timings["draft_n"] = stats.num_draft_tokens
        timings["draft_n_accepted"] = stats.num_accepted_tokens
    return timings


def _rates(name: str, seconds: float | None, num_tokens: int) -> dict[str, float | None]:
    per_token = per_second = None
    if seconds and num_tokens > 0:
        per_token = round(seconds * 1e3 / num_tokens, 3)
        per_second = round(num_tokens / seconds, 3)
    return {
        f"{name}_ms": None if seconds is None else round(seconds * 1e3, 3),
        f"{name}_per_token_ms": per_token,
        f"{name}_per_second": per_second,
    }


def _constraint_field(fields: GenerationFields, params: SamplingParams) -> str:
    """Return the field by which a client has asked for a constraint: tools, where no other has."""
    if fields.constraint is not None:
        return fields.constraint.field
    return "tools" if params.structured_outputs is not None else ""


def _deadline(asked: float | None, most: float | None, arrival_time: float) -> float | None:
    timeouts = [timeout for timeout in (asked, most) if timeout is not None]
    return arrival_time + min(timeouts) if timeouts else None
