"""How often a head is right on answers that it has not seen."""

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

_POSITIONS = 256  # that are run at a time


@torch.no_grad()
def ranks(head: TrainableHead[Any], examples: Examples[Any], units: Tensor) -> Tensor:
    """At which place of a head's guesses the token of the answer is: int64 [n, K], 0 for the first;
    a number above all places where the shortlist has not got it. ``n``: positions of the units.

    A tie counts as the last of its places: for the head is not told.
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
    """How often the chain of first guesses is right at each position ahead, where it was at all
    those before: [K]. ``places``: as of ``ranks``."""
    is_right = (places == 0).cumprod(dim=1)
    counts = [len(places), *is_right.sum(dim=0).tolist()]
    return [right / max(1, of) for of, right in zip(counts, counts[1:], strict=False)]


def accuracies(places: Tensor, guesses: int) -> list[list[float]]:
    """How often each of the first ``guesses`` at each position ahead is right, by themselves:
    [K][guesses]. ``places``: as of ``ranks``."""
    return [
        [float((column == guess).float().mean()) for guess in range(guesses)]
        for column in places.unbind(1)
    ]


def expected_tokens(rates: Sequence[float], length: int | None = None) -> float:
    """Of a step that verifies a chain of ``length`` guesses, its own token included."""
    return 1 + sum(accumulate(rates[:length], mul))
