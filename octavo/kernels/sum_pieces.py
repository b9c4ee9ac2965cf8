"""Pieces of inputs, and heads, that ranks have by the scheme `sum` (``sum_division.py``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from octavo.kernels.parts import Part

SLICES = 8


@dataclass(frozen=True, slots=True)
class Pieces:
    """The inputs of a closing matrix that one rank multiplies, piece by piece; or the inner values
    of experts.

    ``is_divided``: other ranks have others; else every rank has all pieces.
    """

    ranges: tuple[range, ...]
    is_divided: bool

    @property
    def own(self) -> range:
        return range(self.ranges[0].start, self.ranges[-1].stop)


def pieces_of(size: int, units: Sequence[int], part: Part, is_canonical: bool) -> Pieces:
    """Cut ``size`` inputs for one rank.

    Args:
        units: sizes of pieces that inputs may be cut into, the best first; the first that is enough
            is taken, where none is, the last.
    """
    wanted = SLICES if is_canonical else part.size
    unit = next((each for each in units if -(-size // each) >= wanted), units[-1])
    num_units = -(-size // unit)
    count = part.size
    if is_canonical:
        count = min(SLICES, 1 << (num_units.bit_length() - 1))
    ends = [min(size, num_units * index // count * unit) for index in range(1, count + 1)]
    ranges = tuple(range(begin, end) for begin, end in zip([0, *ends], ends, strict=False))
    if part.is_whole or num_units < count or count % part.size:
        return Pieces(ranges if is_canonical else (range(size),), False)
    each = count // part.size
    return Pieces(ranges[part.rank * each :][:each], True)


def most_heads(of_ranks: Iterable[Pieces], group: int) -> tuple[int, int]:
    """Return the most query heads that a rank has, and the most KV heads, which may be another
    rank's. ``group``: query heads that read a KV head."""
    owns = [pieces.own for pieces in of_ranks]
    return max(map(len, owns)), max(sum(map(len, key_heads(own, group))) for own in owns)


def key_heads(heads: range, group: int) -> tuple[range, ...]:
    """Return the KV heads that a range of query heads reads, ``group`` of them each, so that all
    are read by equally many: some are there more than once where it is not whole groups."""
    bounds = {heads.start, heads.stop, *range(-(-heads.start // group) * group, heads.stop, group)}
    cuts = sorted(bounds)
    each = math.gcd(*(end - begin for begin, end in zip(cuts, cuts[1:], strict=False)))
    read = [head // group for head in range(heads.start, heads.stop, each)]
    runs = [next(run) for _, run in groupby(read)] if each == group else read
    if runs == list(range(runs[0], runs[-1] + 1)):
        return (range(runs[0], runs[-1] + 1),)
    return tuple(range(head, head + 1) for head in runs)
