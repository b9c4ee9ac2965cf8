"""Division of a step's fused ops among ranks by the scheme `sum`, as GPUs share a model.

Of two matrices that follow each other, ranks share out the outputs of the first and the inputs of
the second, whose results they add up (Megatron-LM, arXiv 1909.08053)::

    q, k, v      the rank's heads         \\  o       columns of these heads      \\  FusedSum
    gate, up     the rank's inner values  /   down    columns of these values     /
    experts      inner values of each
    embedding    rows of the rank's tokens, zeros for others, added up
    head         logits of the rank's tokens, gathered by rank 0

So a layer takes two sums. What is between others, such as norms, routers and the residual stream,
all ranks compute whole. Units of inputs, such as groups and superblocks of quantized weights, and
heads are never cut: ranks have as many as come out, one more or less. What has no unit for each
rank is computed whole by all of them.

A KV head is repeated where several ranks read it, and within a rank whose query heads are not whole
groups of one KV head each.

*Canonical* sums do not depend on the number of ranks (arXiv 2511.17826): inputs are cut into eight
slices, or four or two where there are fewer units, of which slice i ends at unit [(i + 1) n / 8].
A slice is one product, and slices are added as a binary tree, in float32. A rank has neighbouring
slices, that is a branch of the tree; where ranks are more than slices, each computes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from octavo.kernels.fused_ops import (
    ALONE,
    CannotFuse,
    FusedAttention,
    FusedEmbedding,
    FusedExperts,
    FusedHead,
    FusedLatentAttention,
    FusedLinear,
    FusedOp,
    FusedRows,
    FusedSegment,
    FusedSum,
    WeightRef,
    reads,
    writes,
)
from octavo.kernels.parts import Part
from octavo.kernels.recorder import Value
from octavo.kernels.routing import ExpertWeights
from octavo.kernels.sum_pieces import SLICES, Pieces, key_heads, most_heads, pieces_of

_ROW_UNIT = 16  # rows that kernels like to have, and columns

UnitOf: TypeAlias = Callable[[WeightRef], int]


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A reference to some rows, in this order, and some columns of a matrix."""

    of: WeightRef
    rows: tuple[range, ...]
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.rows)), len(self.columns)

    @property
    def name(self) -> str:
        """The rows and columns in words, which make a name behind that of the matrix."""
        rows = ",".join(f"{each.start}:{each.stop}" for each in self.rows)
        return f"[{rows}; {self.columns.start}:{self.columns.stop}]"


class SumDivision:
    """The ops of one rank.

    Args:
        ops: of the whole model.
        unit_of: returns how many inputs of a matrix belong together.
        is_canonical: sums do not depend on the number of ranks; for one rank, too.

    Raises:
        CannotFuse: canonical sums of a number of ranks that is no power of two up to eight.
    """

    def __init__(
        self, ops: Sequence[FusedOp], part: Part, unit_of: UnitOf, is_canonical: bool = False
    ):
        if is_canonical and part.size not in (1, 2, 4, 8):
            raise CannotFuse(
                f"batch_invariant adds up {SLICES} slices, which {part.size} ranks cannot share "
                "out evenly: choose 1, 2, 4 or 8"
            )
        self._part, self._unit_of, self._is_canonical = part, unit_of, is_canonical
        self._readers: dict[Value, list[FusedOp]] = {}
        self._makers: dict[Value, FusedOp] = {}
        for op in ops:
            for value in reads(op):
                self._readers.setdefault(value, []).append(op)
            for value in writes(op):
                self._makers[value] = op
        # What takes the place of values of which the rank has a part, and the rows that these are.
        self._values: dict[Value, Value] = {}
        self._rows: dict[Value, tuple[range, ...]] = {}
        self._closing: dict[int, Pieces] = {}  # by the id of an op
        self._heads: Pieces | None = None  # query heads, in units of them
        # KV heads of the rank that has most; None where none are divided.
        self.most_kv_heads: int | None = None
        self._divide_heads(ops)
        for op in ops:
            self._divide_inner(op)
        self.ops: list[FusedOp] = [made for op in ops for made in self._made(op)]

    # -- what is divided --------------------------------------------------------------------------

    def _divide_heads(self, ops: Sequence[FusedOp]) -> None:
        """Cut the attention of all layers alike, since their KV has one shape; or of none."""
        mixers = [op for op in ops if isinstance(op, FusedAttention | FusedLatentAttention)]
        outs = [self._closes(mixer.out) for mixer in mixers]
        shapes = {(mixer.q.shape[0], _num_kv_heads(mixer)) for mixer in mixers}
        if len(shapes) != 1 or None in outs or not all(map(self._is_plain, mixers)):
            return
        ((num_heads, num_kv_heads),) = shapes
        unit = 1
        for mixer, out in zip(mixers, outs, strict=True):
            assert out is not None
            size = mixer.out.width // num_heads
            unit = math.lcm(unit, math.lcm(self._unit_of(out.segments[0].weight), size) // size)
        group = num_heads // num_kv_heads

        def pieces_of_part(part: Part) -> Pieces:
            units = math.lcm(unit, group), unit
            return pieces_of(num_heads, units, part, self._is_canonical)

        pieces = pieces_of_part(self._part)
        self._heads = pieces
        if isinstance(mixers[0], FusedAttention):
            _, self.most_kv_heads = most_heads(
                map(pieces_of_part, self._part.of_all_ranks()), group
            )
        for mixer, out in zip(mixers, outs, strict=True):
            assert out is not None
            size = mixer.out.width // num_heads
            self._closing[id(out)] = _times(pieces, size)
            if pieces.is_divided:
                self._cut(mixer.q, (pieces.own,), mixer.q.width // num_heads)
                self._cut(mixer.out, (pieces.own,), size)
                if isinstance(mixer, FusedAttention):
                    for value in (mixer.k, mixer.v):
                        self._cut(value, key_heads(pieces.own, group), value.width // num_kv_heads)

    def _is_plain(self, mixer: FusedAttention | FusedLatentAttention) -> bool:
        """Whether its heads are rows of matrices, and nothing else reads them."""
        values = (
            [mixer.q] if isinstance(mixer, FusedLatentAttention) else [mixer.q, mixer.k, mixer.v]
        )
        return all(
            len(self._readers[value.source]) == 1
            and isinstance(maker := self._makers.get(value.source), FusedLinear)
            and maker.activation is None
            and maker.residual is None
            for value in values
        )

    def _divide_inner(self, op: FusedOp) -> None:
        """Cut the inner values of an MLP, given its closing op, or of experts."""
        if isinstance(op, FusedExperts):
            downs = [expert.down for expert in op.experts]
            unit = math.lcm(*map(self._unit_of, downs))
            self._closing[id(op)] = self._inner(downs[0].shape[1], unit)
            return
        if not isinstance(op, FusedLinear) or self._closes(op.source) is not op:
            return
        inner: list[Value] = [op.source]
        maker = self._makers.get(op.source.source)
        if isinstance(maker, FusedRows) and maker.kind in ALONE.values():
            inner.append(maker.a)
            maker = self._makers.get(maker.a.source)
            is_opening = isinstance(maker, FusedLinear) and maker.activation is None
        else:
            is_opening = isinstance(maker, FusedLinear) and maker.activation is not None
        if not is_opening or any(len(self._readers[each.source]) > 1 for each in inner):
            return
        pieces = self._inner(op.source.width, self._unit_of(op.segments[0].weight))
        self._closing[id(op)] = pieces
        if pieces.is_divided:
            for value in inner:
                self._cut(value, (pieces.own,), 1)

    def _inner(self, size: int, unit: int) -> Pieces:
        return pieces_of(size, (math.lcm(unit, _ROW_UNIT), unit), self._part, self._is_canonical)

    def _closes(self, value: Value) -> FusedLinear | None:
        """Return the product of one matrix that alone reads a value, as it is."""
        reader, *others = self._readers.get(value.source, [None])
        if (
            others
            or not isinstance(reader, FusedLinear)
            or reader.source.source is not value.source
        ):
            return None
        is_plain = reader.norm is None and reader.added is None and reader.activation is None
        return reader if is_plain and len(reader.segments) == 1 else None

    def _cut(self, value: Value, units: tuple[range, ...], size: int) -> None:
        """Note that the rank has some units of a value, each of ``size`` numbers."""
        rows = tuple(range(each.start * size, each.stop * size) for each in units)
        count = sum(map(len, units))
        shape = (count, size) if len(value.shape) > 1 else (count * size,)
        self._rows[value.source] = rows
        self._values[value.source] = Value(value.tape, None, shape)

    # -- the ops of the rank ----------------------------------------------------------------------

    def _made(self, op: FusedOp) -> Iterator[FusedOp]:
        match op:
            case FusedEmbedding():
                yield self._embedding(op)
            case FusedLinear():
                opened = replace(op, segments=[self._segment(op, each) for each in op.segments])
                yield from self._closed(op, opened)
            case FusedAttention():
                made = replace(
                    op, q=self._at(op.q), k=self._at(op.k), v=self._at(op.v), out=self._at(op.out)
                )
                if op.sinks is not None and op.out.source in self._values:
                    assert self._heads is not None
                    made.sinks = op.sinks[self._heads.own.start : self._heads.own.stop]
                yield made
            case FusedLatentAttention():
                yield self._latent_attention(op)
            case FusedRows() if op.a.source in self._values:
                yield replace(op, a=self._at(op.a), out=self._at(op.out))
            case FusedExperts():
                yield from self._experts(op)
            case FusedHead():
                yield self._head(op)
            case _:
                yield op

    def _at(self, value: Value) -> Value:
        return self._values.get(value.source, value)

    def _segment(self, op: FusedLinear, segment: FusedSegment) -> FusedSegment:
        """Return the rows of a matrix that the rank multiplies; of an activation, those of its
        output."""
        out = op.segments[0].out if op.activation else segment.out
        rows = self._rows.get(out.source)
        if rows is None:
            return segment
        return FusedSegment(
            _rows_of(segment.weight, rows), _vector(segment.bias, rows), self._at(segment.out)
        )

    def _closed(self, op: FusedLinear, opened: FusedLinear) -> Iterator[FusedOp]:
        """Yield a product as it is, or as its pieces and their sum."""
        pieces = self._closing.get(id(op))
        if pieces is None or (not pieces.is_divided and len(pieces.ranges) == 1):
            yield opened
            return
        (segment,), source = opened.segments, self._at(op.source)
        first = pieces.own.start if pieces.is_divided else 0
        terms = []
        for piece in pieces.ranges:
            terms.append(_like(segment.out))
            # Somebody has to add the bias, once.
            bias = segment.bias if piece.start == 0 else None
            yield FusedLinear(
                source,
                [FusedSegment(_columns_of(segment.weight, piece), bias, terms[-1])],
                first_input=piece.start - first,
            )
        yield self._sum(terms, segment.out, pieces, op.residual, op.scale)

    def _sum(
        self,
        terms: Sequence[Value],
        out: Value,
        pieces: Pieces,
        residual: Value | None,
        scale: float | None = None,
    ) -> FusedSum:
        return FusedSum(terms, out, pieces.is_divided, self._is_canonical, residual, scale)

    def _latent_attention(self, op: FusedLatentAttention) -> FusedLatentAttention:
        if op.q.source not in self._values:
            return op
        assert self._heads is not None
        size, own = op.kv_b.shape[0] // op.q.shape[0], self._heads.own
        kv_b = _rows_of(op.kv_b, (range(own.start * size, own.stop * size),))
        return replace(op, q=self._at(op.q), out=self._at(op.out), kv_b=kv_b)

    def _experts(self, op: FusedExperts) -> Iterator[FusedOp]:
        pieces = self._closing[id(op)]
        if not pieces.is_divided and len(pieces.ranges) == 1:
            yield op
            return
        terms = []
        for piece in pieces.ranges:
            terms.append(_like(op.out))
            experts = [_inner_of(expert, piece) for expert in op.experts]
            yield replace(op, experts=experts, out=terms[-1], residual=None)
        yield self._sum(terms, op.out, pieces, op.residual)

    def _tokens(self, vocab_size: int) -> list[range]:
        """Return the tokens of each rank; none where there are too few."""
        if self._part.is_whole or vocab_size < _ROW_UNIT * self._part.size:
            return []
        return [part.of_rows(vocab_size) for part in self._part.of_all_ranks()]

    def _embedding(self, op: FusedEmbedding) -> FusedEmbedding:
        if not (tokens := self._tokens(op.weight.shape[0])):
            return op
        own = tokens[self._part.rank]
        return replace(op, weight=_rows_of(op.weight, (own,)), token_ids=own)

    def _head(self, op: FusedHead) -> FusedHead:
        if not (tokens := self._tokens(op.weight.shape[0])):
            return op
        weight = _rows_of(op.weight, (tokens[self._part.rank],))
        return replace(op, weight=weight, tokens_of_ranks=tokens)


def _num_kv_heads(op: FusedAttention | FusedLatentAttention) -> int:
    return op.k.shape[0] if isinstance(op, FusedAttention) else op.q.shape[0]


def _times(pieces: Pieces, size: int) -> Pieces:
    ranges = tuple(range(each.start * size, each.stop * size) for each in pieces.ranges)
    return Pieces(ranges, pieces.is_divided)


def _rows_of(matrix: WeightRef, rows: tuple[range, ...]) -> MatrixPart:
    return MatrixPart(matrix, rows, range(matrix.shape[1]))


def _columns_of(matrix: WeightRef, columns: range) -> MatrixPart:
    return MatrixPart(matrix, (range(matrix.shape[0]),), columns)


def _vector(values: Any, rows: Sequence[range]) -> Any:
    if values is None:
        return None
    return np.concatenate([values[each.start : each.stop] for each in rows])


def _inner_of(expert: ExpertWeights, inner: range) -> ExpertWeights:
    """Return an expert with some of its inner values; the bias of the result is of the first."""
    return ExpertWeights(
        _rows_of(expert.gate, (inner,)),
        _rows_of(expert.up, (inner,)),
        _columns_of(expert.down, inner),
        _vector(expert.gate_bias, (inner,)),
        _vector(expert.up_bias, (inner,)),
        expert.down_bias if inner.start == 0 else None,
    )


def _like(value: Value) -> Value:
    return Value(value.tape, None, value.shape)
