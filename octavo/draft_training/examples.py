"""What a head is trained and judged on: positions of answers, with what the target says there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

# The most probable tokens of a position that are kept of the target's distribution.
TOP = 16
_ROWS = 1024  # of logits that are there at a time

Inputs = TypeVar("Inputs")
"""What a head reads of a batch."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What a head has of the model that it guesses for.

    ``embedding``: [V, d], of any float type. ``shortlist``: int64 [S], ascending. ``rows``: float32
    [S, d], the head's rows of these. ``norm``: float32 [d], what the final norm multiplies with.
    """

    embedding: Tensor
    shortlist: Tensor
    rows: Tensor
    norm: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the shortlist [n, S], of hidden states after the final norm [n, d]."""
        return F.linear(hidden, self.rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        """float32 [..., d]."""
        return F.embedding(token_ids, self.embedding).float()


@dataclass(frozen=True, slots=True)
class TrainingSequences:
    """Prompts with their answers, one behind the other, T tokens in all.

    ``token_ids``: int64 [T]. ``hidden``: bfloat16 [T, d], after the final norm. ``streams``:
    bfloat16 [T, n d], the residual stream at n depths. ``ends``: int64 [T], where the sequence of a
    token ends. ``is_answer``: bool [T].
    """

    token_ids: Tensor
    hidden: Tensor
    streams: Tensor
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
class TrainingBatch(Generic[Inputs]):
    """B positions, and K tokens ahead of each.

    ``inputs``: what the head reads. ``wanted``: int64 [B, K], the tokens of the answer, as indices
    of the shortlist; -1 where they are not in it. ``likely``: int64 [B, K, TOP], what the target
    finds likely there, as such indices; ``shares`` float32, of the same shape: how likely, with a
    sum of one.
    """

    inputs: Inputs
    wanted: Tensor
    likely: Tensor
    shares: Tensor


class Examples(ABC, Generic[Inputs]):
    """Batches of some sequences, for the heads of a target.

    ``units``: what is drawn at random, int64 [U]. ``unit_size``: the positions of a unit, about.
    """

    units: Tensor
    unit_size: int

    def __init__(self, target: TargetWeights, sequences: TrainingSequences, steps: int):
        self.target, self._sequences, self._steps = target, sequences, steps
        places = torch.full((len(target.embedding),), -1)
        places[target.shortlist] = torch.arange(len(target.shortlist))
        self._wanted = places[sequences.token_ids]
        self._likely, self._shares = _most_likely(target, sequences.hidden)

    def batch(self, units: Tensor) -> TrainingBatch[Inputs]:
        """Of some of the units, in their order."""
        starts, inputs = self._read(units)
        ahead = self._ahead(starts)
        likely, shares = self._likely[ahead].long(), self._shares[ahead]
        return TrainingBatch(inputs, self._wanted[ahead + 1], likely, shares)

    def _ahead(self, starts: Tensor) -> Tensor:
        """The positions p + 1 ... p + K, int64 [B, K]: their tokens are read, those after them are
        guessed."""
        return starts[:, None] + 1 + torch.arange(self._steps)

    @abstractmethod
    def _read(self, units: Tensor) -> tuple[Tensor, Inputs]:
        """The positions p of some units, int64 [B], and what a head reads of these."""


class PositionBatch(NamedTuple):
    """``hidden``: float32 [B, d], after the final norm, of positions p. ``embeddings``: float32
    [B, K, d], of the tokens p + 1 ... p + K."""

    hidden: Tensor
    embeddings: Tensor


class PositionExamples(Examples[PositionBatch]):
    """Single positions, from anywhere: for heads that see one hidden state."""

    unit_size = 1

    def __init__(self, target: TargetWeights, sequences: TrainingSequences, steps: int):
        super().__init__(target, sequences, steps)
        self.units = sequences.starts(steps)

    def _read(self, units: Tensor) -> tuple[Tensor, PositionBatch]:
        tokens = self._sequences.token_ids[self._ahead(units)]
        return units, PositionBatch(
            self._sequences.hidden[units].float(), self.target.embed(tokens)
        )


@torch.no_grad()
def _most_likely(target: TargetWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the shortlist, int32 [T, TOP], and their probabilities among themselves."""
    found = [
        target.logits(rows.float()).topk(min(TOP, len(target.shortlist)))
        for rows in hidden.split(_ROWS)
    ]
    values = torch.cat([each.values for each in found])
    return torch.cat([each.indices.int() for each in found]), values.softmax(dim=-1)
