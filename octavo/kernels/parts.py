"""The part of a model that one rank computes: of each layer, and of the layers.

The ranks of a tensor-parallel group share each layer. All matrices are cut by their outputs, and
attention by its heads, so that each number is computed by one rank as a model on one rank computes
it: the answers are the same to the bit. Inputs are never cut, so that neither are groups or
superblocks of quantized weights.

The stages of a pipeline have some of the layers each, one stage after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.kernels.cpu.layout import TILE
from octavo.kernels.expert_places import ExpertPlaces


@dataclass(frozen=True, slots=True)
class Part:
    """Rank ``rank`` of ``size``; by default all of the model.

    Args:
        experts: where experts are, if ranks have whole ones; None: they are cut as matrices are.
        by_sequences: attention is not cut: each rank computes all heads, for its own sequences.
    """

    rank: int = 0
    size: int = 1
    experts: ExpertPlaces | None = None
    by_sequences: bool = False

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    def of_rows(self, num_rows: int) -> range:
        """Return the outputs of a matrix that the rank computes, in whole tiles. Ranges may differ
        by a tile, and be empty."""
        num_tiles = -(-num_rows // TILE)
        begin, end = (num_tiles * rank // self.size for rank in (self.rank, self.rank + 1))
        return range(begin * TILE, min(num_rows, end * TILE))

    def divides(self, num_rows: int) -> bool:
        """Whether ranks make parts of so many outputs: there is a tile for each of them. Fewer are
        computed by all."""
        return not self.is_whole and num_rows >= TILE * self.size

    def of_heads(self, num_heads: int) -> range:
        """Return the query heads that the rank computes: 9 heads are 4 and 5. Ranges may be
        empty."""
        if self.by_sequences:
            return range(num_heads)
        begin, end = (num_heads * rank // self.size for rank in (self.rank, self.rank + 1))
        return range(begin, end)

    def of_kv_heads(self, num_heads: int, num_kv_heads: int) -> range:
        """Return the KV heads that the rank's query heads read. Where a KV head is read by the
        query heads of several ranks, each of them has it."""
        heads, group = self.of_heads(num_heads), num_heads // num_kv_heads
        return range(heads.start // group, -(-heads.stop // group)) if heads else range(0)

    def of_all_ranks(self) -> Iterator[Part]:
        """Yield the parts of all ranks, this one's too."""
        return (replace(self, rank=rank) for rank in range(self.size))


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``index`` of ``count`` of a pipeline; by default all of the model."""

    index: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of the stage. What does not come out even goes to the stages in the
        middle, as the last has the head (vLLM does the same)."""
        each, rest = divmod(num_layers, self.count)
        sizes = [each] * self.count
        for index in range(rest):
            sizes[max(0, self.count - 2 - index)] += 1
        first = sum(sizes[: self.index])
        return range(first, first + sizes[self.index])


WHOLE_MODEL = Stage()
