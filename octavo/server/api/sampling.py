"""Convert the fields of a request to sampling parameters, and check lengths."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from octavo.base.errors import InvalidRequestError, PromptTooLongError
from octavo.core.limits import check_output_tokens, check_vocabulary, context_tokens
from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import HasSinkWindow
from octavo.server.api.requests import GenerationFields
from octavo.server.engine.generation import EngineFacts
from octavo.server.settings import MAX_STOP_CHARS

# Fields with the same name and meaning in both. Where a request lacks one, the recommendation of
# the model's authors is taken, or else the default of SamplingParams. Those that are left out are
# read below.
_SAME = (
    {each.name for each in dataclasses.fields(SamplingParams)}
    & {*GenerationFields.model_fields, "best_of"}
) - {"stop", "seed", "max_tokens", "prompt_logprobs", "speculative", "structured_outputs"}
_NO_SINK_WINDOW: HasSinkWindow = SamplingParams()  # fields of a request without a window
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


def to_sampling_params(
    fields: GenerationFields,
    facts: EngineFacts,
    *,
    max_tokens: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the parameters that a request asks for, always with a seed, so that it can be run
    again.

    Raises:
        InvalidRequestError: a field is wrong; the error names it.
    """
    values: dict[str, Any] = {
        name: facts.sampling_defaults[name]
        for name in _RECOMMENDED
        if name in facts.sampling_defaults
    }
    given = {name: getattr(fields, name, None) for name in _SAME}
    values |= {name: value for name, value in given.items() if value is not None}
    if fields.speculative is not None:
        values["speculative"] = fields.speculative.model_dump(exclude_none=True)
    if not values.get("allowed_token_ids"):
        values.pop("allowed_token_ids", None)  # an empty list asks for nothing
    stop = fields.stop_strings()
    if sum(map(len, stop)) > MAX_STOP_CHARS:
        raise InvalidRequestError(f"at most {MAX_STOP_CHARS} characters in all", "stop")
    params = SamplingParams(
        **values,
        stop=tuple(stop),
        seed=secrets.randbits(63) if fields.own_seed is None else fields.own_seed,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=None if fields.constraint is None else fields.constraint.value,
    )
    check_vocabulary(params, facts.vocab_size)
    return params


def check_stream_fields(fields: GenerationFields) -> None:
    """Raise InvalidRequestError for fields that only a stream, or only a whole answer, can have."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("needs stream to be true", "stream_options")
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequestError("is not available in a stream", "prompt_logprobs")


def is_deterministic(fields: GenerationFields, params: SamplingParams) -> bool:
    """True if the same request would get the same answer again: it is greedy, or has its own
    seed."""
    return params.temperature == 0 or fields.own_seed is not None


def context_of(facts: EngineFacts) -> int:
    """Return the number of tokens that a prompt and its completion may have together."""
    return context_tokens(facts.max_model_len, facts.num_slots)


def may_exceed_context(fields: HasSinkWindow, max_tokens: int | None, facts: EngineFacts) -> bool:
    """True if a request may be longer than the context: it has a sliding window and a length."""
    return max_tokens is not None and facts.sink_windows.of(fields, facts.max_model_len) is not None


def resolve_max_tokens(
    num_prompt_tokens: int,
    max_tokens: int | None,
    facts: EngineFacts,
    fields: HasSinkWindow = _NO_SINK_WINDOW,
    field: str = "max_tokens",
) -> int:
    """Return ``max_tokens``, by default as many as the context and the server's limit allow.

    Args:
        field: the client's name of ``max_tokens``, for errors.

    Raises:
        InvalidRequestError: there is no prompt, or an answer may not have so many tokens.
        PromptTooLongError: the context is too short.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequestError("is empty: there is nothing to continue", "prompt")
    sink_window = facts.sink_windows.of(fields, facts.max_model_len)
    check_output_tokens(max_tokens, facts.max_output_tokens, sink_window, field)
    if max_tokens is not None and sink_window is not None:
        return max_tokens
    context = context_of(facts)
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt_tokens + wanted > context:
        raise PromptTooLongError(
            f"This model's maximum context length is {context} tokens, and the request needs "
            f"{num_prompt_tokens + wanted}: {num_prompt_tokens} of the prompt and {wanted} of the "
            "completion. Shorten the prompt or lower max_tokens.",
            num_prompt_tokens,
            context,
        )
    if max_tokens is not None:
        return max_tokens
    return min(context - num_prompt_tokens, facts.max_output_tokens or context)


def truncate(token_ids: list[int], fields: GenerationFields, room: int) -> list[int]:
    """Return the part of a prompt that ``truncate_prompt_tokens`` leaves.

    Args:
        room: tokens that the context has beside the completion.
    """
    length = fields.truncate_prompt_tokens
    if length is None:
        return token_ids
    if length == -1:
        length = max(room, 0)
    if len(token_ids) <= length:
        return token_ids
    if fields.truncation_side == "right":
        return token_ids[:length]
    return token_ids[len(token_ids) - length :]
