"""Training examples, positions of answers with the target's distribution of the tokens ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

TOP = 16  # tokens of the target's distribution that are kept for a position, the likeliest
_ROWS = 1024  # rows of logits that are computed at a time

Inputs = TypeVar("Inputs")
"""The inputs that a head reads for a batch."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Weights of the target model that draft heads share.

    ``embedding``: [V, d], of any float type. ``shortlist``: int64 [S], ascending. ``rows``: the
    output head's rows of the shortlist, float32 [S, d]. ``norm``: the weight of the final norm,
    float32 [d].
    """

    embedding: Tensor
    shortlist: Tensor
    rows: Tensor
    norm: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the shortlist [n, S] of hidden states after the final norm [n, d]."""
        return F.linear(hidden, self.rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of tokens, float32 [..., d]."""
        return F.embedding(token_ids, self.embedding).float()


@dataclass(frozen=True, slots=True)
class TrainingSequences:
    """Prompts with their answers, concatenated to T tokens.

    ``token_ids``: int64 [T]. ``hidden``: hidden states after the final norm, bfloat16 [T, d].
    ``streams``: the residual stream at n depths, bfloat16 [T, n d]. ``ends``: the end of each
    token's sequence, int64 [T]. ``is_answer``: bool [T].
    """

    token_ids: Tensor
    hidden: Tensor
    streams: Tensor
    ends: Tensor
    is_answer: Tensor

    def starts(self, steps: int) -> Tensor:
        """The positions p, int64 [n], whose tokens p + 2 ... p + 1 + steps exist and are of the
        answer."""
        positions = torch.arange(len(self.token_ids))
        inside = positions + 1 + steps < self.ends
        positions = positions[inside]
        return positions[self.is_answer[positions + 2]]


@dataclass(frozen=True, slots=True)
class TrainingBatch(Generic[Inputs]):
    """A batch of B positions, with K tokens ahead of each.

    ``inputs``: the head's inputs. ``wanted``: the answer's tokens as indices into the shortlist,
    int64 [B, K]; -1 for those that are not in it. ``likely``: the target's likeliest tokens as such
    indices, int64 [B, K, TOP]; ``shares``: their probabilities, float32 of the same shape, with a
    sum of one.
    """

    inputs: Inputs
    wanted: Tensor
    likely: Tensor
    shares: Tensor


class Examples(ABC, Generic[Inputs]):
    """Training batches of some sequences, for the heads of a target.

    ``units``: the numbers of the units that batches are drawn from, int64 [U]. ``unit_size``: about
    how many positions a unit has.
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
        """The batch of some units, in their order."""
        starts, inputs = self._read(units)
        ahead = self._ahead(starts)
        likely, shares = self._likely[ahead].long(), self._shares[ahead]
        return TrainingBatch(inputs, self._wanted[ahead + 1], likely, shares)

    def _ahead(self, starts: Tensor) -> Tensor:
        """The positions p + 1 ... p + K, int64 [B, K]: their tokens are read, and the token after
        each is predicted."""
        return starts[:, None] + 1 + torch.arange(self._steps)

    @abstractmethod
    def _read(self, units: Tensor) -> tuple[Tensor, Inputs]:
        """The positions p of some units, int64 [B], and the head's inputs at these."""


class PositionBatch(NamedTuple):
    """Inputs of heads without attention, at positions p.

    ``hidden``: hidden states after the final norm, float32 [B, d]. ``embeddings``: those of the
    tokens p + 1 ... p + K, float32 [B, K, d].
    """

    hidden: Tensor
    embeddings: Tensor


class PositionExamples(Examples[PositionBatch]):
    """Single positions in random order, for heads that read one hidden state."""

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
    """The likeliest tokens as indices into the shortlist, int32 [T, TOP], and their probabilities,
    with a sum of one."""
    found = [
        target.logits(rows.float()).topk(min(TOP, len(target.shortlist)))
        for rows in hidden.split(_ROWS)
    ]
    values = torch.cat([each.values for each in found])
    return torch.cat([each.indices.int() for each in found]), values.softmax(dim=-1)
