"""Which ranks of a group have which experts of a model, where each has whole ones (expert
parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# For each expert of a layer, the ranks that have it, ascending: one, or several that share its
# rows.
LayerPlaces = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """For each layer that has experts, in their order, the ranks that have each of them."""

    layers: tuple[LayerPlaces, ...]

    @classmethod
    def of(cls, layers: Sequence[Sequence[Sequence[int]]]) -> ExpertPlaces:
        """Return the places that lists, as JSON has them, say."""
        return cls(tuple(tuple(tuple(ranks) for ranks in layer) for layer in layers))

    def num_here(self, rank: int) -> int:
        """Return the number of experts that a rank has, in all layers."""
        return sum(rank in ranks for layer in self.layers for ranks in layer)


def deal_out(num_experts: int, num_ranks: int) -> LayerPlaces:
    """Return equal runs of a layer's experts, the first for rank 0: 7 of 2 ranks are 3 and 4."""
    ends = [num_experts * (rank + 1) // num_ranks for rank in range(num_ranks)]
    places: list[tuple[int, ...]] = []
    for rank, end in enumerate(ends):
        places += [(rank,)] * (end - len(places))
    return tuple(places)
