"""Training examples for heads with attention, pieces of answers with the context before them.

Such a head attends to every position up to the one that it predicts from, so neighbouring positions
form a piece, whose context is computed once. A batch has several pieces, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.draft_training.examples import Examples, TargetWeights, TrainingSequences

# The most positions of a piece that are predicted from. Longer pieces share more of their context;
# but neighbours resemble each other, and a step of few pieces teaches less than one of many.
_PIECE = 16
_CONTEXT = 256  # the most positions of context before these


class ContextBatch(NamedTuple):
    """A batch of concatenated pieces: C positions, of which B are predicted from.

    ``streams``: the target's residual stream at n depths, float32 [C, n d]. ``following``: the
    embedding of the token after each position, float32 [C, d]. ``positions``: those in their
    sequences, int64 [C]. ``embeddings``: those of the tokens p + 1 ... p + K of each position p
    that is predicted from, float32 [B, K, d]. ``lengths``: positions of each piece; ``counts``: how
    many of these, the last ones, are predicted from.
    """

    streams: Tensor
    following: Tensor
    positions: Tensor
    embeddings: Tensor
    lengths: list[int]
    counts: list[int]

    def starts(self) -> Tensor:
        """Indices of the positions that are predicted from, int64 [B]."""
        ends = accumulate(self.lengths)
        return torch.cat(
            [torch.arange(end - n, end) for end, n in zip(ends, self.counts, strict=True)]
        )


class _Piece(NamedTuple):
    """A piece: positions ``start`` to ``stop`` - 1 are predicted from, with context from ``begin``
    on."""

    begin: int
    start: int
    stop: int


class ContextExamples(Examples[ContextBatch]):
    """Training batches of pieces of answers with their context."""

    unit_size = _PIECE

    def __init__(self, target: TargetWeights, sequences: TrainingSequences, steps: int):
        super().__init__(target, sequences, steps)
        self._begins = _begins(sequences)
        self._pieces = list(_cut(sequences.starts(steps).tolist(), self._begins.tolist()))
        self.units = torch.arange(len(self._pieces))

    def _read(self, units: Tensor) -> tuple[Tensor, ContextBatch]:
        pieces = [self._pieces[unit] for unit in units.tolist()]
        starts = torch.cat([torch.arange(each.start, each.stop) for each in pieces])
        seen = torch.cat([torch.arange(each.begin, each.stop) for each in pieces])
        tokens = self._sequences.token_ids
        return starts, ContextBatch(
            self._sequences.streams[seen].float(),
            self.target.embed(tokens[seen + 1]),
            seen - self._begins[seen],
            self.target.embed(tokens[self._ahead(starts)]),
            [each.stop - each.begin for each in pieces],
            [each.stop - each.start for each in pieces],
        )


def _begins(sequences: TrainingSequences) -> Tensor:
    """The begin of each token's sequence, int64 [T]."""
    ends, lengths = sequences.ends.unique_consecutive(return_counts=True)
    return (ends - lengths).repeat_interleave(lengths)


def _cut(starts: list[int], begins: list[int]) -> Iterator[_Piece]:
    """Cut ascending ``starts`` into pieces, of nearly equal length within a sequence."""
    by_sequence: dict[int, list[int]] = {}
    for start in starts:
        by_sequence.setdefault(begins[start], []).append(start)
    for begin, run in by_sequence.items():
        count = -(-len(run) // _PIECE)
        bounds = [run[0] + len(run) * number // count for number in range(count + 1)]
        for start, stop in zip(bounds, bounds[1:], strict=False):
            yield _Piece(max(begin, start - _CONTEXT), start, stop)
