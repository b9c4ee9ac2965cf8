"""What a head is trained and judged on: positions of answers, with what the target says there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# The most probable tokens of a position that are kept of the target's distribution.
TOP = 16
_ROWS = 1024  # of logits that are there at a time


@dataclass(frozen=True, slots=True)
class Target:
    """What a head has of the model that it guesses for.

    ``embedding``: [V, d], of any float type. ``shortlist``: int64 [S], ascending. ``rows``: float32
    [S, d], the head's rows of these.
    """

    embedding: Tensor
    shortlist: Tensor
    rows: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the shortlist [n, S], of hidden states after the final norm [n, d]."""
        return F.linear(hidden, self.rows)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Prompts with their answers, one behind the other, T tokens in all.

    ``token_ids``: int64 [T]. ``hidden``: bfloat16 [T, d], after the final norm. ``ends``: int64
    [T], where the sequence of a token ends. ``is_answer``: bool [T].
    """

    token_ids: Tensor
    hidden: Tensor
    ends: Tensor
    is_answer: Tensor

    def starts(self, steps: int) -> Tensor:
        """The positions p, int64 [n], of which the tokens p + 2 ... p + 1 + steps are there and are
        of the answer."""
        positions = torch.arange(len(self.token_ids))
        inside = positions + 1 + steps < self.ends
        positions = positions[inside]
        return positions[self.is_answer[positions + 2]]


@dataclass(frozen=True, slots=True)
class Batch:
    """B positions, and K tokens ahead of each.

    ``hidden``: float32 [B, d]. ``embeddings``: float32 [B, K, d]. ``wanted``: int64 [B, K], the
    tokens of the answer, as indices of the shortlist; -1 where they are not in it. ``likely``:
    int64 [B, K, TOP], what the target finds likely there, as such indices; ``shares`` float32, of
    the same shape: how likely, with a sum of one.
    """

    hidden: Tensor
    embeddings: Tensor
    wanted: Tensor
    likely: Tensor
    shares: Tensor


class Examples:
    """Batches of some sequences, for the heads of a target."""

    def __init__(self, target: Target, sequences: Sequences, steps: int):
        self.target, self._sequences, self._steps = target, sequences, steps
        self.starts = sequences.starts(steps)
        places = torch.full((len(target.embedding),), -1)
        places[target.shortlist] = torch.arange(len(target.shortlist))
        self._wanted = places[sequences.token_ids]
        self._likely, self._shares = _most_likely(target, sequences.hidden)

    def batch(self, starts: Tensor) -> Batch:
        """Of some of ``starts``, int64 [B]."""
        ahead = starts[:, None] + 1 + torch.arange(self._steps)
        tokens = self._sequences.token_ids[ahead]
        return Batch(
            self._sequences.hidden[starts].float(),
            F.embedding(tokens, self.target.embedding).float(),
            self._wanted[ahead + 1],
            self._likely[ahead].long(),
            self._shares[ahead],
        )


@torch.no_grad()
def _most_likely(target: Target, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the shortlist, int32 [T, TOP], and their probabilities among themselves."""
    found = [
        target.logits(rows.float()).topk(min(TOP, len(target.shortlist)))
        for rows in hidden.split(_ROWS)
    ]
    values = torch.cat([each.values for each in found])
    return torch.cat([each.indices.int() for each in found]), values.softmax(dim=-1)
