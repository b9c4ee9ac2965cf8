"""Memory for the activations of a step, shared by values in turn.

The outputs of one product are columns of one tensor, side by side in each row::

    [max_tokens, q | k | v]     three values, each of which is a view

The tensor is reused once all of its values have been read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels import fused_ops
from octavo.kernels.fused_ops import FusedOp
from octavo.kernels.recorder import Value


class _Kind(NamedTuple):
    """Width and type of buffers that can be reused for each other."""

    width: int
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class _Buffer:
    tensor: Tensor  # [max_tokens, width]
    num_users: int = 0  # values in it that will still be read

    @property
    def kind(self) -> _Kind:
        return _Kind(self.tensor.shape[1], self.tensor.dtype)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Place of a value: the columns of a buffer from ``start`` on."""

    buffer: _Buffer
    start: int


class Buffers:
    """A place for every value of a program, for up to ``max_tokens`` tokens.

    Args:
        kept: values that nothing overwrites, as in ``fused_ops.place``.
        lent: buffers of another program, which runs before or after this one. They are reused,
            except those that it keeps.
    """

    def __init__(
        self,
        ops: Sequence[FusedOp],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: Collection[Value] = (),
        lent: Buffers | None = None,
    ):
        self._max_tokens, self._dtype, self._device = max_tokens, dtype, device
        self._joined = dict(_joined_values(ops))
        self._opened: dict[Value, _Columns] = {}  # for values whose product was given a buffer
        # Buffers that hold no value at the moment.
        self._free: dict[_Kind, list[_Buffer]] = defaultdict(list)
        self._wide = set(_wide_values(ops))
        self._used: list[_Buffer] = []
        self.num_bytes = 0
        if lent is not None:
            self._borrow(lent)
        self._places = fused_ops.place(ops, self._allocate, self._release, kept)
        self._kept = [self._places[value.source].buffer for value in kept]
        self._between = self._room_between(max_tokens * max(map(self._width_between, ops)), lent)

    def tensor(self, value: Value) -> Tensor:
        """Tensor of a value, [max_tokens, width]; its row stride may be larger than the width."""
        place = self._places[value.source]
        return place.buffer.tensor[:, place.start : place.start + value.width]

    def are_joint(self, values: Sequence[Value]) -> bool:
        """True if these values are all outputs of one product, in this order, or one value that is
        alone."""
        group = tuple(value.source for value in values)
        return self._joined.get(group[0], group[:1]) == group

    def joint(self, values: Sequence[Value]) -> Tensor:
        """Tensor [max_tokens, all widths] of values that are joint."""
        assert self.are_joint(values), [value.width for value in values]
        if len(values) == 1:
            return self.tensor(values[0])
        return self._places[values[0].source].buffer.tensor

    def between(self, width: int) -> Tensor:
        """Scratch [max_tokens, width] between two launches of one fused op."""
        return self.rooms_between(width)[0]

    def rooms_between(self, *widths: int) -> list[Tensor]:
        """Several such scratch tensors at once, each contiguous."""
        ends = [self._max_tokens * end for end in accumulate(widths)]
        return [
            self._between[end - self._max_tokens * width : end].view(-1, width)
            for end, width in zip(ends, widths, strict=True)
        ]

    def is_same(self, value: Value, other: Value) -> bool:
        """True if both values have the same place."""
        return self._places[value.source] == self._places[other.source]

    def _allocate(self, value: Value) -> _Columns:
        if value not in self._opened:
            group = self._joined.get(value, (value,))
            dtype = torch.float32 if value in self._wide else self._dtype
            buffer = self._take(_Kind(sum(each.width for each in group), dtype))
            buffer.num_users, start = len(group), 0
            for each in group:
                self._opened[each] = _Columns(buffer, start)
                start += each.width
        return self._opened.pop(value)

    def _take(self, kind: _Kind) -> _Buffer:
        if self._free[kind]:
            return self._free[kind].pop()
        buffer = _Buffer(self._zeros(self._max_tokens, kind.width, dtype=kind.dtype))
        self._used.append(buffer)
        return buffer

    def _borrow(self, lent: Buffers) -> None:
        self._used = [_Buffer(each.tensor) for each in lent._used if each not in lent._kept]
        for buffer in self._used:
            self._free[buffer.kind].append(buffer)

    def _release(self, place: _Columns) -> None:
        place.buffer.num_users -= 1
        if not place.buffer.num_users:
            self._free[place.buffer.kind].append(place.buffer)

    def _width_between(self, op: FusedOp) -> int:
        """Scratch per row of a fused op: queries for attention, and its inputs if they are not
        joint; the norm of a sum before a product, or a product that is scaled; the norm of an
        experts' input; learned positions."""
        match op:
            case fused_ops.FusedAttention():
                parts = op.q, op.k, op.v
                together = 0 if self.are_joint(parts) else sum(part.width for part in parts)
                return op.q.width + together
            case fused_ops.FusedLinear() if op.added is not None:
                return op.source.width
            case fused_ops.FusedLinear() if op.scale is not None:
                return op.segments[0].out.width
            case fused_ops.FusedExperts() if op.norm is not None:
                return op.source.width
            case fused_ops.FusedEmbedding() if op.positions is not None:
                return op.out.width
        return 0

    def _room_between(self, size: int, lent: Buffers | None) -> Tensor:
        if lent is not None and lent._between.numel() >= size:
            return lent._between
        return self._zeros(size)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype or self._dtype, device=self._device)
        self.num_bytes += tensor.nbytes
        return tensor


def _joined_values(ops: Sequence[FusedOp]) -> Iterator[tuple[Value, tuple[Value, ...]]]:
    """Yields each value that is one of several outputs of a product, with all of these in order."""
    for op in ops:
        if isinstance(op, fused_ops.FusedLinear) and op.activation is None:
            group = tuple(segment.out.source for segment in op.segments)
            if len(group) > 1:
                yield from ((value, group) for value in group)


def _wide_values(ops: Sequence[FusedOp]) -> Iterator[Value]:
    """Yields the values that are float32, whatever others are: logits of routers, and the terms of
    canonical sums."""
    for op in ops:
        if isinstance(op, fused_ops.FusedExperts):
            yield op.logits.source
        elif isinstance(op, fused_ops.FusedSum) and op.is_canonical:
            yield from (term.source for term in op.terms)
