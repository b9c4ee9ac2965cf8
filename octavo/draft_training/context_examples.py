"""Pieces of answers with the context before them: examples for heads with attention.

Such a head sees every position up to the one that it guesses from, so positions that stand together
are trained together: their context is computed once. A batch has several pieces, one behind the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.draft_training.examples import Examples, TargetWeights, TrainingSequences

# Positions that are guessed from, at most. Longer pieces share more of their context; but positions
# that stand together resemble each other, and a step of few pieces teaches less than one of many.
_PIECE = 16
_CONTEXT = 256  # positions before these that are seen, at most


class ContextBatch(NamedTuple):
    """Pieces, one behind the other: C positions in all, and B of them that are guessed from.

    ``streams``: float32 [C, n d], the target's residual stream at n depths. ``following``: float32
    [C, d], embeddings of the tokens after each. ``positions``: int64 [C], in their sequences.
    ``embeddings``: float32 [B, K, d], of the tokens p + 1 ... p + K of each position p that is
    guessed from. ``lengths``: of the pieces; ``counts``: how many of each, its last ones, are
    guessed from.
    """

    streams: Tensor
    following: Tensor
    positions: Tensor
    embeddings: Tensor
    lengths: list[int]
    counts: list[int]

    def starts(self) -> Tensor:
        """Which of the C are guessed from, int64 [B]."""
        ends = accumulate(self.lengths)
        return torch.cat(
            [torch.arange(end - n, end) for end, n in zip(ends, self.counts, strict=True)]
        )


class _Piece(NamedTuple):
    """Positions ``start`` ... ``stop`` - 1 are guessed from, those from ``begin`` on are seen."""

    begin: int
    start: int
    stop: int


class ContextExamples(Examples[ContextBatch]):
    """Runs of positions of one answer each."""

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
    """Where the sequence of each token begins, int64 [T]."""
    ends, lengths = sequences.ends.unique_consecutive(return_counts=True)
    return (ends - lengths).repeat_interleave(lengths)


def _cut(starts: list[int], begins: list[int]) -> Iterator[_Piece]:
    """Pieces of the ``starts``, which ascend: in each sequence of nearly the same length."""
    by_sequence: dict[int, list[int]] = {}
    for start in starts:
        by_sequence.setdefault(begins[start], []).append(start)
    for begin, run in by_sequence.items():
        count = -(-len(run) // _PIECE)
        bounds = [run[0] + len(run) * number // count for number in range(count + 1)]
        for start, stop in zip(bounds, bounds[1:], strict=False):
            yield _Piece(max(begin, start - _CONTEXT), start, stop)
