"""What a request may ask for, and how many may wait: each fact is checked here, whoever asks.

The engine checks what it is given. A server that wants to refuse before that, in another process,
asks the same functions, with the same limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.core.sight import Sight
from octavo.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from octavo.scalars import plain, plain_list


def checked_token_ids(
    token_ids: Iterable[Any], vocab_size: int, field: str = "prompt_token_ids"
) -> list[int]:
    """The ids of a prompt as a list; InvalidRequestError names the first that is none."""
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


def context_tokens(max_model_len: int, num_slots: int) -> int:
    """How many tokens a request may have: as many as the model takes, and the KV pool holds."""
    # The last token is sampled and never computed, so it needs no slot.
    return min(max_model_len, num_slots + 1)


def check_sight(
    sight: Sight, num_tokens: int, num_blocks: int, block_size: int, step_tokens: int
) -> None:
    """Raise InvalidRequestError if a pool has no room for what a request of so many tokens sees,
    and a step."""
    needed = min(sight.most_blocks(block_size, step_tokens), -(-num_tokens // block_size))
    if needed > num_blocks:
        raise InvalidRequestError(
            f"{sight.sinks} sinks, the last {sight.window} tokens and a step of {step_tokens} take "
            f"{needed} blocks of the KV pool, which has {num_blocks}: lower it, or raise "
            "num_blocks or kv_cache_memory",
            "window",
        )


def total_tokens_of(
    num_prompt: int,
    max_tokens: int | None,
    max_model_len: int,
    num_slots: int,
    sight: Sight | None = None,
) -> int:
    """Tokens at which a request ends by length.

    One that does not see all of its tokens may have any number, if it says how many.

    Raises:
        InvalidRequestError: the prompt is empty.
        PromptTooLongError: that can never be reached.
    """
    if num_prompt == 0:
        raise InvalidRequestError("is empty: there is nothing to continue", "prompt")
    if sight is not None and max_tokens is not None:
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


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of what may wait; None is no bound. Requests count by sample."""

    max_requests: int | None = None
    max_tokens: int | None = None

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Raise InvalidRequestError if so many could not wait together in an empty queue."""
        if self.max_requests is not None and num_requests > self.max_requests:
            raise InvalidRequestError(
                f"{num_requests} completions are more than the {self.max_requests} requests that "
                "may wait here: ask for fewer at once, with a lower n or fewer prompts"
            )
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"the prompts have {num_tokens} tokens, counted once for each completion; "
                f"{self.max_tokens} may wait here: shorten them, or ask for fewer at once"
            )

    def check_requests(self, num_waiting: int, num_more: int = 1) -> None:
        """Raise QueueFullError if no such number of requests can join those that wait."""
        if self.max_requests is not None and num_waiting + num_more > self.max_requests:
            raise QueueFullError(f"{num_waiting} requests are waiting already")

    def check_tokens(self, num_waiting: int, num_more: int) -> None:
        """Raise QueueFullError if no such number of tokens can join those that wait."""
        if self.max_tokens is not None and num_waiting + num_more > self.max_tokens:
            raise QueueFullError(f"{num_waiting} tokens are waiting already")
