"""What one HTTP request makes the engine do: a generation for each prompt, all or none."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.errors import EngineError, InvalidRequestError, OctavoError
from octavo.server.context import RequestContext
from octavo.server.generation import (
    Completion,
    Delta,
    Generation,
    GenerationRequest,
    GenerationStats,
)
from octavo.server.openai_sampling import is_deterministic
from octavo.server.protocol.requests import GenerationFields
from octavo.server.service import Service
from octavo.server.settings import MAX_SAMPLES
from octavo.server.tenants import RateLimitError

# What octavo.runtime.sampler (which would load torch) says of requests that left it no choice.
_IMPOSSIBLE = (
    "allowed_token_ids, bad_words, min_tokens and logit_bias leave no token to sample",
    "logit_bias or penalties made a logit NaN or infinite",
)


class Job:
    """The generations of one HTTP request. Close it, whatever happens.

    Making one charges the tenant and queues every prompt, or raises and leaves nothing behind.

    Raises:
        RateLimitError, RequestError, EngineUnavailableError, QuarantinedError: as
            `Tenant.charge_tokens` and `EngineClient.submit` do.
    """

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        route: str,
        fields: GenerationFields,
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ):
        num_samples = len(prompts) * params.num_samples
        if num_samples > MAX_SAMPLES:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with {params.num_samples} completions each are "
                f"{num_samples}; a request may ask for {MAX_SAMPLES}",
                "n",
            )
        self.params = params
        self._tenant = context.tenant
        self._engine = service.engine
        deadline = _deadline(fields.timeout, service.settings.request_timeout, context.arrival_time)
        requests = [
            GenerationRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=prompt,
                params=params,
                arrival_time=context.arrival_time,
                priority=fields.priority or 0,
                cache_salt="\0".join(filter(None, (context.tenant.salt, fields.cache_salt))),
                deadline=deadline,
                streams=bool(fields.stream),
                is_deterministic=is_deterministic(fields, params),
                external_id=context.external_id,
                route=route,
                tenant=context.tenant.name,
            )
            for prompt in prompts
        ]
        self._charged = sum(request.cost for request in requests)
        self._is_closed = False
        self.generations: list[Generation] = []
        try:
            self._tenant.charge_tokens(self._charged)
        except RateLimitError as error:
            service.observer.on_rejected(error.reason)
            raise
        try:
            for request in requests:
                self.generations.append(self._engine.submit(request))
        except BaseException:
            for generation in self.generations:
                generation.close()
            self._tenant.refund_tokens(self._charged)
            raise

    def close(self) -> None:
        """End what still runs, and refund the tokens that did not come. May be repeated."""
        for generation in self.generations:
            generation.close()
        if not self._is_closed:
            self._is_closed = True
            used = sum(
                self.params.num_samples * generation.stats.num_prompt_tokens
                + generation.stats.num_output_tokens
                for generation in self.generations
            )
            self._tenant.refund_tokens(max(self._charged - used, 0))

    async def collect(self) -> list[list[Completion]]:
        """The ``n`` completions of each prompt, the most likely of them where there are more."""
        return [_best(await each.collect(), self.params.n) for each in self.generations]

    async def updates(self) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        """What is new, with the number of its prompt, as it comes.

        What nobody reads stays in the generations.
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

    # -- what it took ------------------------------------------------------------------------

    @property
    def num_pending_chars(self) -> int:
        return sum(generation.num_pending_chars for generation in self.generations)

    @property
    def is_from_cache(self) -> bool:
        """Whether nothing had to be computed for any prompt."""
        return all(generation.is_from_cache for generation in self.generations)

    def usage(self, *, counts_output: bool = True) -> dict[str, Any]:
        """The ``usage`` object, as it stands."""
        stats = [generation.stats for generation in self.generations]
        num_prompt = sum(each.num_prompt_tokens for each in stats)
        num_output = sum(each.num_output_tokens for each in stats) if counts_output else 0
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.num_cached_tokens for each in stats)
            },
        }

    def timings(self) -> dict[str, Any] | None:
        """The ``timings`` object; None for several prompts, whose times overlap."""
        if len(self.generations) > 1:
            return None
        return _timings(self.generations[0].stats, self.params.num_samples)


def sample_error(reason: str | None) -> OctavoError:
    """The error of a request that got no sample, for a sample's own: its fault, or the engine's."""
    if reason in _IMPOSSIBLE:
        return InvalidRequestError(reason)
    return EngineError(reason or "no token could be sampled")


async def _next(generation: Generation) -> list[Delta] | None:
    return await anext(generation, None)


def _best(completions: list[Completion], n: int) -> list[Completion]:
    if len(completions) > n:
        completions = sorted(completions, key=_badness)[:n]
        for index, completion in enumerate(completions):
            completion.index = index
    return completions


def _badness(completion: Completion) -> float:
    likelihood = completion.cumulative_logprob
    return float("inf") if likelihood is None else -likelihood


def _timings(stats: GenerationStats, num_samples: int) -> dict[str, Any]:
    num_computed = stats.num_prompt_tokens - stats.num_cached_tokens
    num_after_first = stats.num_output_tokens - num_samples
    return {
        "cache_n": stats.num_cached_tokens,
        "prompt_n": num_computed,
        **_rates("prompt", stats.prefill_time, num_computed),
        "predicted_n": stats.num_output_tokens,
        **_rates("predicted", stats.decode_time, num_after_first),
    }


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


def _deadline(asked: float | None, most: float | None, arrival_time: float) -> float | None:
    timeouts = [timeout for timeout in (asked, most) if timeout is not None]
    return arrival_time + min(timeouts) if timeouts else None
