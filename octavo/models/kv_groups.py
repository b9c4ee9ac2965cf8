"""Groups of layers that share a block table, so that layers with windows can free old blocks.

Layers that see the same positions could have one table. But a block should serve any group, and so
hold as many layers whichever it is: they are dealt out to groups of equal size. Gemma 3 with 3
layers that see all, and 15 that see 512 positions, has six groups of three::

    group 0   layers 5 11 17        window None
    group 1   layers 0  1  2        window 512
    group 2   layers 3  4  6        window 512      and so on

Where numbers do not divide, some groups have a layer less than a block has room for. The idea is
that of vLLM's hybrid KV cache manager; the sizes are chosen by our own rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.models.config import KVSpec

# Room for layers that are not there may take this share of a block, for fewer groups.
_MOST_PADDING = 0.1


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of a model's layers.

    Args:
        windows: of each group, the positions that its layers see; None: all. Those first.
        places: of each layer, its group, and which of the group's layers it is in a block.
        layers_per_block: that a block has room for.
    """

    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    layers_per_block: int

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def bytes_of_slot(self, bytes_per_token: int) -> int:
        """Bytes of a position in a block, for a token that takes ``bytes_per_token`` in all
        layers."""
        return bytes_per_token // len(self.places) * self.layers_per_block

    def of_layers(self, layers: range) -> KVGroups:
        """Return the same groups with some of the layers alone: those of one stage of a
        pipeline."""
        counts: Counter[int] = Counter()
        places = []
        for group, _ in self.places[layers.start : layers.stop]:
            places.append((group, counts[group]))
            counts[group] += 1
        return KVGroups(self.windows, tuple(places), max(counts.values(), default=1))


def one_table(num_layers: int) -> KVGroups:
    """All layers keep all tokens, in the same blocks."""
    places = tuple((0, layer) for layer in range(num_layers))
    return KVGroups((None,), places, num_layers)


def group_layers(layers: Sequence[KVSpec], num_stages: int = 1) -> KVGroups:
    """The groups of layers that keep as much of a token each; one table where they do not.

    ``num_stages``: of a pipeline. Layers that follow each other are then in different groups, as
    the blocks of a stage are as large as the group of which it has most layers."""
    if len({(spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in layers}) > 1:
        return one_table(len(layers))
    alike: dict[int | None, list[int]] = defaultdict(list)
    for layer, spec in enumerate(layers):
        alike[spec.window].append(layer)
    size = _layers_per_block([len(each) for each in alike.values()])
    windows: list[int | None] = []
    places = [(0, 0)] * len(layers)
    for window in sorted(alike, key=lambda each: (each is not None, each)):
        first, count = len(windows), -(-len(alike[window]) // size)
        windows += [window] * count
        for index, layer in enumerate(alike[window]):
            group, place = (
                divmod(index, size) if num_stages == 1 else (index % count, index // count)
            )
            places[layer] = first + group, place
    return KVGroups(tuple(windows), tuple(places), size)


def _layers_per_block(counts: Sequence[int]) -> int:
    """Choose the size of groups that leaves little of a block unused, for so many layers of each
    kind."""

    def padding(size: int) -> float:
        return sum(-count % size for count in counts) / sum(counts)

    return next(size for size in range(min(counts), 0, -1) if padding(size) <= _MOST_PADDING)
