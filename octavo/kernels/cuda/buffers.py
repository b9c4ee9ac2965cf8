"""Memory for the activations of a step, shared by values in turn.

The outputs of one product are columns of one tensor, side by side in each row::

    [max_tokens, q | k | v]     three values, of which each is a view

It serves another value once all of them have been read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels import fusion
from octavo.kernels.fusion import CannotFuse, Phase
from octavo.kernels.recorder import Value


class _Kind(NamedTuple):
    """Buffers of one kind serve each other's values."""

    width: int
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class _Buffer:
    tensor: Tensor  # [max_tokens, width]
    num_users: int = 0  # values that are there and will be read

    @property
    def kind(self) -> _Kind:
        return _Kind(self.tensor.shape[1], self.tensor.dtype)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where a value is."""

    buffer: _Buffer
    start: int


class Buffers:
    """A place for every value of a program, for up to ``max_tokens`` tokens.

    Args:
        kept: values that nothing overwrites, as ``fusion.place`` has them.
        lent: of another program, which runs before or after this one: what it does not keep, these
            overwrite.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: Collection[Value] = (),
        lent: Buffers | None = None,
    ):
        self._max_tokens, self._dtype, self._device = max_tokens, dtype, device
        self._joined = dict(_joined_values(phases))
        self._opened: dict[Value, _Columns] = {}  # for values whose product was given a buffer
        # By what there is of them, those that are of no use to anyone just now.
        self._free: dict[_Kind, list[_Buffer]] = defaultdict(list)
        # Routers are computed in float32, and so are their logits.
        self._wide = {each.logits.source for each in phases if isinstance(each, fusion.Experts)}
        self._used: list[_Buffer] = []
        self.num_bytes = 0
        if lent is not None:
            self._borrow(lent)
        self._places = fusion.place(phases, self._allocate, self._release, kept)
        self._kept = [self._places[value.source].buffer for value in kept]
        self._between = self._room_between(max_tokens * max(map(_width_between, phases)), lent)

    def tensor(self, value: Value) -> Tensor:
        """[max_tokens, width]; rows may be farther apart than they are long."""
        place = self._places[value.source]
        return place.buffer.tensor[:, place.start : place.start + value.width]

    def joint(self, values: Sequence[Value]) -> Tensor:
        """What consists of these values and nothing else. CannotFuse if there is no such tensor."""
        places = [self._places[value.source] for value in values]
        tensor, widths = places[0].buffer.tensor, [value.width for value in values]
        side_by_side = [
            _Columns(places[0].buffer, start) for start in accumulate(widths[:-1], initial=0)
        ]
        if places != side_by_side or sum(widths) != tensor.shape[1]:
            raise CannotFuse(f"values of widths {widths} are not all that one product makes")
        return tensor

    def between(self, width: int) -> Tensor:
        """[max_tokens, width] for what is there between two launches of one phase only."""
        return self._between[: self._max_tokens * width].view(self._max_tokens, width)

    def is_same(self, value: Value, other: Value) -> bool:
        """Whether they lie at the same place."""
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

    def _room_between(self, size: int, lent: Buffers | None) -> Tensor:
        if lent is not None and lent._between.numel() >= size:
            return lent._between
        return self._zeros(size)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype or self._dtype, device=self._device)
        self.num_bytes += tensor.nbytes
        return tensor


def _width_between(phase: Phase) -> int:
    """Of a row that is written and read by the same phase: queries for attention, the norm of a
    sum for products, and that of what experts read."""
    if isinstance(phase, fusion.Attention):
        return phase.q.width
    if isinstance(phase, fusion.Linear) and phase.added is not None:
        return phase.source.width
    if isinstance(phase, fusion.Experts) and phase.norm is not None:
        return phase.source.width
    return 0


def _joined_values(phases: Sequence[Phase]) -> Iterator[tuple[Value, tuple[Value, ...]]]:
    """Each value that is one of several outputs of a product, with all of these in their order."""
    for phase in phases:
        if isinstance(phase, fusion.Linear) and phase.activation is None:
            group = tuple(segment.out.source for segment in phase.segments)
            if len(group) > 1:
                yield from ((value, group) for value in group)
