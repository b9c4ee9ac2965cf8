"""What is wanted of the logits at a prompt's positions: log-probabilities, or all of them.

Sampling needs one row of logits for each request. These need many, which a runner computes for
them alone; here is said which, and what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.core.batch import ScheduledRequest, StepOutput, TokenLogprobs
from octavo.core.executor import LogitsObserver
from octavo.runtime.forward import Forward, Logits

# So many rows at a time bound the memory.
LOGITS_ROWS = 64


def add_prompt_logprobs(
    item: ScheduledRequest,
    first_row: int,
    forward: Forward,
    observer: LogitsObserver | None,
    output: StepOutput,
) -> None:
    """Log-probabilities of an item's prompt tokens, if asked for, and what an observer wants.

    ``first_row``: where the item begins in the batch that ``forward`` has run last.
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
    """What the model thought of prompt tokens: position p judges the token at p + 1.

    After a preemption, the positions reported before are computed again and skipped here.
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
    """Those of the wanted positions of a prompt that an item computes, a few at a time."""
    first = max(item.start, wanted.start)
    stop = min(item.start + item.num_tokens, wanted.stop, item.request.num_prompt_tokens)
    for begin in range(first, stop, LOGITS_ROWS):
        yield range(begin, min(begin + LOGITS_ROWS, stop))
