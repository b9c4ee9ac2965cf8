"""The memory of recurrent states, by slots (``core/state_slots.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import numpy as np

from octavo.kernels.cpu.recurrence import StateLayout
from octavo.layers.recurrence_config import StateSpec
from octavo.runtime.lazy_zeros import lazy_zeros


class StateMemory:
    """The states of all recurrent layers, in float32: a slot holds those of one sequence.

    Args:
        layers: the shapes of each layer's states.
    """

    def __init__(self, layers: Sequence[StateSpec], num_slots: int):
        self.num_slots = num_slots
        self._shapes = [spec.shapes for spec in layers]
        places = accumulate((size for spec in layers for size in spec.sizes), initial=0)
        self._offsets = [[next(places) for _ in shapes] for shapes in self._shapes]
        size = next(places)
        data = lazy_zeros(4 * num_slots * size)
        self._data = data.view(np.float32).reshape(num_slots, size)

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    def layer(self, index: int) -> list[np.ndarray]:
        """Return views of a layer's states: float32 [slots, ...], one for each of its shapes."""
        places = zip(self._offsets[index], self._shapes[index], strict=True)
        return [
            self._data[:, offset : offset + prod(shape)].reshape(self.num_slots, *shape)
            for offset, shape in places
        ]

    @property
    def num_layers(self) -> int:
        return len(self._shapes)

    def layout(self) -> StateLayout:
        """Return the addresses for native kernels, valid as long as the memory."""
        addresses = [
            [self._data[0, offset:].ctypes.data for offset in offsets] for offsets in self._offsets
        ]
        return StateLayout(addresses, self._data.shape[1], self.num_slots)


def create_state_memory(layers: Sequence[StateSpec], num_slots: int) -> StateMemory | None:
    """Allocate the states of recurrent layers, None if a model has no such layers."""
    return StateMemory(layers, num_slots) if layers else None
