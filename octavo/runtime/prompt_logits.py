"""Log-probabilities of prompts, and logits at prompt positions for an observer.

Sampling needs one row of logits for each request; these need a row for each prompt position, which
the model runner computes separately, a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.core.batch import ScheduledRequest, StepOutput, TokenLogprobs
from octavo.core.executor import LogitsObserver
from octavo.runtime.forward import Forward, Logits

# Rows of logits at a time, which bounds the memory.
LOGITS_ROWS = 64


def add_prompt_logprobs(
    item: ScheduledRequest,
    first_row: int,
    forward: Forward,
    observer: LogitsObserver | None,
    output: StepOutput,
) -> None:
    """Add the log-probabilities of an item's prompt tokens to ``output``, if they are requested,
    and show logits to ``observer``.

    ``first_row``: the item's first row in the last batch of ``forward``.
    """
    request = item.request
    before = first_row - item.start
    if request.params.prompt_logprobs is not None:
        entries = list(_prompt_logprobs(item, before, forward))
        output.prompt_logprobs[request.request_id] = entries
    if observer is not None:
        for positions in _computed(item, observer.wants(request)):
            logits = forward.logits(_shifted(positions, before))
            observer.observe(request, positions.start, _as_array(logits))


def _prompt_logprobs(
    item: ScheduledRequest, before: int, forward: Forward
) -> Iterator[TokenLogprobs]:
    """Yield the log-probabilities of prompt tokens: the logits of position p give those of p + 1.

    After a preemption, positions are computed again; those reported before are skipped.
    """
    request = item.request
    num_top = request.params.prompt_logprobs
    assert num_top is not None
    due = range(request.num_prompt_logprobs, request.num_prompt_tokens - 1)
    for positions in _computed(item, due):
        targets = request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
        yield from forward.logprobs(_shifted(positions, before), targets, num_top)


def _shifted(positions: range, by: int) -> range:
    return range(positions.start + by, positions.stop + by)


def _as_array(logits: Logits) -> np.ndarray:
    if isinstance(logits, np.ndarray):
        return logits
    return logits.float().cpu().numpy()


def _computed(item: ScheduledRequest, wanted: range) -> Iterator[range]:
    """Yield the wanted prompt positions that an item computes, LOGITS_ROWS at a time."""
    first = max(item.start, wanted.start)
    stop = min(item.start + item.num_tokens, wanted.stop, item.request.num_prompt_tokens)
    for begin in range(first, stop, LOGITS_ROWS):
        yield range(begin, min(begin + LOGITS_ROWS, stop))
