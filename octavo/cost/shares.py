"""The share of a model that one rank of a tensor-parallel group has, by the scheme of sharing.

`sum`      devices with links, GPUs: the first of two matrices by its outputs, the second by its
           inputs, and results are added up; heads come out even
`uneven sum`
           the same, where they do not, as octavo has it: KV heads with all that read them, or
           single query heads where KV heads are fewer than devices (``kernels/sum_pieces.py``)
`gather`   processes on one machine, CPUs: every matrix by its outputs, attention by heads, as
           ``kernels/parts.py`` has the ranges; results are read where other ranks have written them

Ranges may be uneven. A share is that of the rank that has most of a thing, for which the others
wait, or whose memory is full first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import ceil
from typing import Literal, Protocol

from octavo.base.errors import ConfigError
from octavo.kernels.parts import Part
from octavo.kernels.sum_pieces import most_heads, pieces_of
from octavo.models.tensor_split import Split
from octavo.runtime.layout import RankBounds, check_ranks

Scheme = Literal["sum", "uneven sum", "gather"]


class Matrix(Protocol):
    """The parts of a `octavo.cost.weight_shape.WeightShape` that are needed."""

    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def units(self) -> int: ...
    @property
    def query_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def split(self) -> Split: ...


class Shares(Protocol):
    """The shares of the rank that has most."""

    def check(self, model: str, heads: Sequence[int], scanned: Sequence[int]) -> None:
        """ConfigError if these cannot be shared out: heads of attention, and pieces of recurrent
        layers."""
        ...

    def heads(self, count: int, kv_heads: int = 0) -> int:
        """Query heads, which read so many KV heads; by default, one each."""
        ...

    def kv_heads(self, heads: int, kv_heads: int) -> int:
        """KV heads, which ``heads`` query heads read."""
        ...

    def pieces(self, count: int) -> int:
        """Heads of a recurrent layer."""
        ...

    def channels(self, count: int) -> int:
        """Channels of a convolution that nothing scans."""
        ...

    def matrix(self, weight: Matrix) -> tuple[int, int]:
        """Outputs and inputs of a matrix; of a vector, outputs and 0."""
        ...

    def exchanges(self, width: int) -> bool:
        """Whether ranks exchange the ``width`` outputs of a matrix, as each computes some."""
        ...


class SumShares:
    """Shares of ``tp`` devices that add up their results."""

    def __init__(self, tp: int):
        self._tp = tp

    def check(self, model: str, heads: Sequence[int], scanned: Sequence[int]) -> None:
        uneven = [count for count in (*heads, *scanned) if count % self._tp]
        if uneven:
            raise ConfigError(
                f"{model}: its {uneven[0]} heads cannot be shared out to tp = {self._tp} "
                f"devices: choose a divisor of {uneven[0]}"
            )

    def heads(self, count: int, kv_heads: int = 0) -> int:
        return ceil(count / self._tp)

    def kv_heads(self, heads: int, kv_heads: int) -> int:
        return ceil(kv_heads / self._tp)

    def pieces(self, count: int) -> int:
        return ceil(count / self._tp)

    def channels(self, count: int) -> int:
        return ceil(count / self._tp)

    def matrix(self, weight: Matrix) -> tuple[int, int]:
        if self._tp == 1 or weight.split is Split.NOTHING:
            return weight.outputs, weight.inputs
        if weight.split is Split.OUTPUTS:
            return self._share(weight.outputs, weight.units), weight.inputs
        return weight.outputs, self._share(weight.inputs, weight.units)

    def _share(self, size: int, units: int) -> int:
        units = units or size
        return ceil(units / self._tp) * ceil(size / units)

    def exchanges(self, width: int) -> bool:
        return False


class UnevenSumShares(SumShares):
    """Shares of ``tp`` devices that add up their results, and may have a head more or less."""

    def check(self, model: str, heads: Sequence[int], scanned: Sequence[int]) -> None:
        super().check(model, [], scanned)
        check_ranks(self._tp, RankBounds(model=model, num_heads=min(heads, default=None)))

    def heads(self, count: int, kv_heads: int = 0) -> int:
        return _most_heads(count, kv_heads or count, self._tp)[0]

    def kv_heads(self, heads: int, kv_heads: int) -> int:
        return _most_heads(heads, kv_heads, self._tp)[1]

    def matrix(self, weight: Matrix) -> tuple[int, int]:
        if not weight.kv_heads:
            return super().matrix(weight)
        size = weight.inputs if weight.split is Split.INPUTS else weight.outputs
        count = weight.units
        if weight.query_heads and count != weight.query_heads:  # of keys or values
            own = self.kv_heads(weight.query_heads, count)
        else:
            own = self.heads(count, weight.kv_heads)
        share = own * (size // count)
        if weight.split is Split.INPUTS:
            return weight.outputs, share
        return share, weight.inputs


@lru_cache(maxsize=256)
def _most_heads(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    group = heads // kv_heads
    parts = Part(size=tp).of_all_ranks()
    return most_heads([pieces_of(heads, (group, 1), part, False) for part in parts], group)


class GatherShares:
    """Shares of ``tp`` processes that read each other's results."""

    def __init__(self, tp: int):
        self._tp = tp

    @cached_property
    def _parts(self) -> list[Part]:
        return list(Part(size=self._tp).of_all_ranks())

    def check(self, model: str, heads: Sequence[int], scanned: Sequence[int]) -> None:
        fewest = min((*heads, *scanned), default=None)
        check_ranks(self._tp, RankBounds(model=model, num_heads=fewest))

    def heads(self, count: int, kv_heads: int = 0) -> int:
        return max(len(part.of_heads(count)) for part in self._parts)

    def kv_heads(self, heads: int, kv_heads: int) -> int:
        return max(len(part.of_kv_heads(heads, kv_heads)) for part in self._parts)

    def pieces(self, count: int) -> int:
        return self.heads(count)

    def channels(self, count: int) -> int:
        return self._rows(count)

    def matrix(self, weight: Matrix) -> tuple[int, int]:
        """Vectors, such as norms and biases, are on every rank."""
        if not weight.inputs:
            return weight.outputs, 0
        if weight.query_heads:
            units = self.kv_heads(weight.query_heads, weight.units)
            return units * (weight.outputs // weight.units), weight.inputs
        return self._rows(weight.outputs), weight.inputs

    def _rows(self, count: int) -> int:
        if not self.exchanges(count):
            return count
        return max(len(part.of_rows(count)) for part in self._parts)

    def exchanges(self, width: int) -> bool:
        """A matrix that has no tile of rows for each rank is computed whole by all."""
        return self._parts[0].divides(width)


def shares(tp: int, scheme: Scheme = "sum") -> Shares:
    if scheme == "gather":
        return GatherShares(tp)
    return SumShares(tp) if scheme == "sum" else UnevenSumShares(tp)


WHOLE = shares(1)
