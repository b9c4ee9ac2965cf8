"""Acceptance of a draft head on held-out answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.draft_training.examples import Examples
from octavo.draft_training.stateless_heads import TrainableHead

_POSITIONS = 256  # evaluated at a time


@torch.no_grad()
def ranks(head: TrainableHead[Any], examples: Examples[Any], units: Tensor) -> Tensor:
    """Ranks of the answer's tokens among a head's predictions, int64 [n, K] for n positions.

    Rank 0 is the likeliest token. A token that is not in the shortlist has the shortlist's length.
    A tie counts as the last of its ranks.
    """
    rows = examples.target.rows
    found = []
    for part in units.split(max(1, _POSITIONS // examples.unit_size)):
        batch = examples.batch(part)
        places = []
        for ahead, state in enumerate(head.states(batch.inputs)):
            logits, wanted = F.linear(state, rows), batch.wanted[:, ahead]
            score = logits.gather(1, wanted.clamp(min=0)[:, None])
            place = (logits >= score).sum(dim=1) - 1
            places.append(torch.where(wanted >= 0, place, len(rows)))
        found.append(torch.stack(places, dim=1))
    return torch.cat(found)


def acceptance(places: Tensor) -> list[float]:
    """Acceptance probabilities of the likeliest tokens by position, each given those before: [K].

    ``places``: the result of ``ranks``.
    """
    is_right = (places == 0).cumprod(dim=1)
    counts = [len(places), *is_right.sum(dim=0).tolist()]
    return [right / max(1, of) for of, right in zip(counts, counts[1:], strict=False)]


def accuracies(places: Tensor, num_ranks: int) -> list[list[float]]:
    """Shares of positions at which each of the first ``num_ranks`` ranks is right: [K][num_ranks].

    ``places``: the result of ``ranks``. Positions ahead are independent of each other here.
    """
    return [
        [float((column == rank).float().mean()) for rank in range(num_ranks)]
        for column in places.unbind(1)
    ]


def expected_tokens(rates: Sequence[float], length: int | None = None) -> float:
    """Expected tokens of a step that verifies a chain of ``length``, its own token included."""
    return 1 + sum(accumulate(rates[:length], mul))
