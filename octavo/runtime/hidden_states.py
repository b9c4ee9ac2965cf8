"""Hidden states of a step, for draft heads that predict tokens from them (``speculation/``).

A hidden state is named by its depth: the residual stream after so many layers, before the norm that
reads it next. Depth 0 is the embedding; the number of layers is the input of the last norm. A
forward that was created with a depth keeps its hidden states until it runs again, and the model
runner shows them to a follower, with the tokens that the step has computed for good: of a draft,
those of the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.core.batch import Batch, ScheduledRequest, StepOutput
from octavo.core.request import Request
from octavo.runtime.forward import ForwardOutput

# Returns the float32 [T, hidden_size] of the last step at a depth, valid until the next step.
States = Callable[[int], np.ndarray]


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """The tokens of a request that a step has computed.

    Args:
        start: the position of the first token; the others follow.
        rows: the row of each token in the step.
        next_token_ids: the token after each, known or just sampled.
        samples: whether the last of these was sampled, so that no later token is known.
    """

    request: Request
    start: int
    rows: list[int]
    next_token_ids: list[int]
    samples: bool

    @property
    def end(self) -> int:
        """The position of the last of ``next_token_ids``."""
        return self.start + len(self.rows)


class StepFollower(Protocol):
    """Is shown every step after it has run, and before the next one."""

    def follow(self, batch: Batch, computed: Sequence[ComputedTokens], states: States) -> None:
        """Read the hidden states of a step. Must not raise.

        ``computed``: the requests of the batch without an error.
        """
        ...


def computed_tokens(
    batch: Batch, rows: ForwardOutput, output: StepOutput, paths: Mapping[int, Sequence[int]]
) -> list[ComputedTokens]:
    """Return the computed tokens of each request of a batch that has no error.

    Args:
        paths: the accepted path of drafts, by the index of their item.
    """
    computed: list[ComputedTokens] = []
    for index, item in enumerate(batch.items):
        request_id = item.request.request_id
        if request_id in output.errors:
            continue
        sampled = output.token_ids.get(request_id, [])
        if item.draft is None and len(sampled) > 1:
            computed.append(_last_of_multi_step(item, int(rows.starts[index]), sampled))
        elif sampled or not item.samples:
            first, path = int(rows.starts[index]), paths.get(index, ())
            computed.append(_of_item(item, first, path, sampled))
    return computed


def _of_item(
    item: ScheduledRequest, first: int, path: Sequence[int], sampled: Sequence[int]
) -> ComputedTokens:
    known, count = item.request.token_ids, item.end - item.start
    at = [*range(first, first + count), *(first + count + index for index in path)]
    follows = [*known[item.start + 1 : item.end], *(sampled or known[item.end : item.end + 1])]
    return ComputedTokens(item.request, item.start, at, follows, bool(sampled))


def _last_of_multi_step(item: ScheduledRequest, row: int, sampled: Sequence[int]) -> ComputedTokens:
    """Return the states of the last of several steps, each of which overwrites those before."""
    start = item.start + len(sampled) - 1
    return ComputedTokens(item.request, start, [row], [sampled[-1]], samples=True)
