"""Limits of single requests and of the waiting queue.

The engine checks what it is given. A server that refuses requests before that, in another process,
calls the same functions with the same limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.base.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from octavo.base.plain_numbers import plain, plain_list
from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import SinkWindow

# Default bound of an answer that the context does not bound.
DEFAULT_OUTPUT_TOKENS = 1 << 16


def checked_token_ids(
    token_ids: Iterable[Any], vocab_size: int, field: str = "prompt_token_ids"
) -> list[int]:
    """Return the ids of a prompt as a list; InvalidRequestError names the first that is none."""
    ids = list(plain_list(token_ids))
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids  # as nearly always, and without a loop in Python
    ids = [*map(plain, ids)]
    for position, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError(
                f"must be integers; position {position} holds {token_id!r}", field
            )
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{token_id} at position {position} is outside the vocabulary "
                f"of {vocab_size} tokens",
                field,
            )
    return ids


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError if parameters name a token that the model does not have."""
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{token_id} is outside the vocabulary of {vocab_size} tokens", name
                )


def check_device(params: SamplingParams, device: str) -> None:
    """Raise InvalidRequestError if parameters ask for a sampler that GPUs lack."""
    if not device.startswith("cuda"):
        return
    for name in ("top_n_sigma", "xtc_probability"):
        if getattr(params, name) > 0:
            raise InvalidRequestError(f"is not supported on GPUs: {device} serves here", name)


def context_tokens(max_model_len: int, num_slots: int) -> int:
    """Return the tokens that a request may have: as many as the model takes, and the KV pool
    holds."""
    # The last token is sampled and never computed, so it needs no slot.
    return min(max_model_len, num_slots + 1)


def check_sink_window(
    sink_window: SinkWindow, num_tokens: int, num_blocks: int, block_size: int, step_tokens: int
) -> None:
    """Raise InvalidRequestError if a pool has no room for the sinks, the window and a step of a
    request."""
    needed = min(sink_window.most_blocks(block_size, step_tokens), -(-num_tokens // block_size))
    if needed > num_blocks:
        raise InvalidRequestError(
            f"{sink_window.sinks} sinks, the last {sink_window.window} tokens and a step of "
            f"{step_tokens} take {needed} blocks of the KV pool, which has {num_blocks}: lower it, "
            "or raise num_blocks or kv_cache_memory",
            "window",
        )


def pooled_tokens_of(num_prompt: int, max_model_len: int, num_slots: int) -> int:
    """Return the number of tokens at which a pooling request ends: those of its prompt.

    Raises:
        InvalidRequestError: the prompt is empty.
        PromptTooLongError: it has more tokens than the context or the pool holds.
    """
    if num_prompt == 0:
        raise InvalidRequestError("is empty: there are no tokens to pool", "input")
    limit = min(max_model_len, num_slots)
    if num_prompt > limit:
        what, remedy = "model", "raise max_model_len if the model allows it"
        if limit < max_model_len:
            what, remedy = "KV pool", "raise num_blocks or kv_cache_memory"
        raise PromptTooLongError(
            f"the text has {num_prompt} tokens and the {what} takes {limit}: shorten it, have it "
            f"truncated (truncate_prompt_tokens), or {remedy}",
            num_prompt,
            limit,
        )
    return num_prompt


def total_tokens_of(
    num_prompt: int,
    max_tokens: int | None,
    max_model_len: int,
    num_slots: int,
    sink_window: SinkWindow | None = None,
) -> int:
    """Return the number of tokens at which a request ends by length.

    A request with a sink window may have any number, if it says how many.

    Raises:
        InvalidRequestError: the prompt is empty.
        PromptTooLongError: that number can never be reached.
    """
    if num_prompt == 0:
        raise InvalidRequestError("is empty: there is nothing to continue", "prompt")
    if sink_window is not None and max_tokens is not None:
        return num_prompt + max_tokens
    limit = context_tokens(max_model_len, num_slots)
    what, remedy = "context", "raise max_model_len if the model allows it"
    if limit < max_model_len:
        what, remedy = "KV pool", "raise num_blocks or kv_cache_memory"
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
    return limit if max_tokens is None else num_prompt + max_tokens


def most_output_tokens(limit: int | None, sink_window: SinkWindow | None) -> int | None:
    """Return the bound of an answer's tokens beside the context, None for no further bound:
    ``limit`` if there is one, and a default for requests that may outgrow the context."""
    if limit is None and sink_window is not None:
        return DEFAULT_OUTPUT_TOKENS
    return limit


def check_output_tokens(
    max_tokens: int | None,
    limit: int | None,
    sink_window: SinkWindow | None,
    field: str = "max_tokens",
) -> None:
    """Raise InvalidRequestError if a request asks for more tokens than ``most_output_tokens``."""
    most = most_output_tokens(limit, sink_window)
    if max_tokens is not None and most is not None and max_tokens > most:
        raise InvalidRequestError(
            f"{max_tokens} are more than the {most} that an answer may have here "
            "(--max-output-tokens)",
            field,
        )


class RequestWork(NamedTuple):
    """The most that requests may take: the unit of every limit.

    Args:
        samples: completions that are generated, ``n`` or ``best_of`` of each prompt.
        tokens: of all samples, each with its prompt and with as many as it may generate.
    """

    samples: int
    tokens: int

    @classmethod
    def of(cls, num_prompt_tokens: int, params: SamplingParams) -> RequestWork:
        """Return the work of one prompt; ``max_tokens`` has to be known."""
        samples = params.num_samples
        return cls(samples, samples * (num_prompt_tokens + (params.max_tokens or 0)))

    def plus(self, other: RequestWork) -> RequestWork:
        return RequestWork(self.samples + other.samples, self.tokens + other.tokens)

    def minus(self, other: RequestWork) -> RequestWork:
        return RequestWork(self.samples - other.samples, self.tokens - other.tokens)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the work that may be in one place at once; None is no bound.

    Requests count by sample. ``are`` completes messages: what requests are in that place.
    """

    max_requests: int | None = None
    max_tokens: int | None = None
    are: str = "waiting"

    def check(self, work: RequestWork) -> None:
        """Raise InvalidRequestError if so much could not be accepted even alone."""
        if self.max_requests is not None and work.samples > self.max_requests:
            raise InvalidRequestError(
                f"{work.samples} completions are more than the {self.max_requests} that may be "
                f"{self.are} here: ask for fewer at once, with a lower n or fewer "
                "prompts",
                "n",
            )
        if self.max_tokens is not None and work.tokens > self.max_tokens:
            raise InvalidRequestError(
                f"prompts and answers may come to {work.tokens} tokens, counted for each "
                f"completion; {self.max_tokens} may be {self.are} here: lower max_tokens or n, "
                "shorten the prompts, or ask for fewer at once",
                "max_tokens",
            )


class WorkBudget:
    """The work of each tenant and of all in one place, held against limits.

    Where a limit is reached, a tenant may still have its share: the limit divided by the number of
    tenants with work there, itself included. So no tenant keeps others out by filling the queue;
    with t tenants there can be 1 + 1/2 + ... + 1/t times the limit, and with one no more than the
    limit.
    """

    def __init__(self, limits: QueueLimits):
        self.limits = limits
        self.total = RequestWork(0, 0)
        self._by_tenant: dict[str, RequestWork] = {}

    def of(self, tenant: str) -> RequestWork:
        """Return the work of a tenant."""
        return self._by_tenant.get(tenant, _NOTHING)

    def check(self, tenant: str, work: RequestWork) -> None:
        """Raise QueueFullError if a tenant cannot have so much more now."""
        self.check_samples(tenant, work.samples)
        self.check_tokens(tenant, work.tokens)

    def check_samples(self, tenant: str, num_more: int = 1) -> None:
        """Check like ``check``, of samples alone."""
        total, own = self.total.samples, self.of(tenant).samples
        if self._is_full(tenant, self.limits.max_requests, total + num_more, own + num_more):
            raise QueueFullError(f"{total} requests are {self.limits.are} already")

    def check_tokens(self, tenant: str, num_more: int) -> None:
        """Check like ``check``, of tokens alone."""
        total, own = self.total.tokens, self.of(tenant).tokens
        if self._is_full(tenant, self.limits.max_tokens, total + num_more, own + num_more):
            raise QueueFullError(
                f"{total} tokens are {self.limits.are} already, of prompts and of answers as long "
                "as they may become"
            )

    def _is_full(self, tenant: str, limit: int | None, total: int, own: int) -> bool:
        """Return whether so many of all, and so many of a tenant, are too many."""
        if limit is None or total <= limit:
            return False
        num_tenants = len(self._by_tenant) + (tenant not in self._by_tenant)
        return own * num_tenants > limit

    def take(self, tenant: str, work: RequestWork) -> None:
        """Add to the work of a tenant, checked or not."""
        self._by_tenant[tenant] = self.of(tenant).plus(work)
        self.total = self.total.plus(work)

    def give_back(self, tenant: str, work: RequestWork) -> None:
        """Subtract from the work of a tenant."""
        left = self._by_tenant[tenant].minus(work)
        if left.samples:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]
        self.total = self.total.minus(work)


_NOTHING = RequestWork(0, 0)
