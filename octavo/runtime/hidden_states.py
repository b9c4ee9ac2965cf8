"""Hidden states of a step, for those who go on from them: heads that draft (``speculation/``).

A hidden state is named by its depth: the residual stream after so many layers, before the norm that
reads it next. 0 is the embedding, and the number of layers what the last norm reads. A forward that
was asked for a depth keeps it until it runs again, and the runner shows it to its follower, with
what of the step is there to stay: of a draft, the path that was right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.core.batch import Batch, ScheduledRequest, StepOutput
from octavo.core.request import Request
from octavo.runtime.forward import ForwardOutput

# Float32 [T, hidden_size] of the last step at a depth, valid until the next.
States = Callable[[int], np.ndarray]


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """What a step has computed of a request.

    Args:
        start: the position of the first token; the others follow.
        rows: of the step, where each of them is.
        next_token_ids: the tokens after each, known or just sampled.
        samples: whether the last of these was sampled, so that nothing is known beyond it.
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
    """Sees every step after it has been run, and before anything else is."""

    def follow(self, batch: Batch, computed: Sequence[ComputedTokens], states: States) -> None:
        """``computed`` has every request of the batch that goes on. It must not raise."""
        ...


def computed_tokens(
    batch: Batch, rows: ForwardOutput, output: StepOutput, paths: Mapping[int, Sequence[int]]
) -> list[ComputedTokens]:
    """What a step has left of its batch.

    Args:
        paths: by the index of an item, the drafted tokens that were right.
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
