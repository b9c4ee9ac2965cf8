"""Parameters of layers, which take their weights from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.quantization.base import Weight


class ShapeMismatch(ValueError):
    """Raised where a weight does not have the shape of its parameter; the loader adds file and
    name."""


class Parameter:
    """The place of one weight in a layer: its shape and, once loaded, its value.

    ``exact`` parameters are kept in float32: norms and biases, which are small and used element by
    element, and routers, where nearly equal scores decide. An exact parameter becomes (stored +
    ``plus``) * ``times``: ``plus`` is for checkpoints that store a weight minus 1, ``times`` (a
    number, or one for each row) for models that scale a weight.
    """

    __slots__ = ("_value", "exact", "plus", "shape", "times")

    def __init__(
        self,
        *shape: int,
        exact: bool = False,
        plus: float = 0.0,
        times: float | Sequence[float] = 1.0,
    ):
        self.shape = shape
        self.exact = exact
        self.plus = plus
        self.times = times
        self._value: Any = None

    @property
    def is_loaded(self) -> bool:
        return self._value is not None

    @property
    def value(self) -> Any:
        """The weight as ops take it.

        This is the ``Weight`` as its file stores it. ``exact`` vectors are float32 arrays, and
        ``exact`` matrices ``Weight`` in float32. In a model ``with_tensors``, all of them are torch
        tensors.
        """
        assert self._value is not None, "a forward pass before the model was loaded"
        return self._value

    def load(self, weight: Weight) -> None:
        """Take ``weight`` as the value; ShapeMismatch if its shape differs. A vector may fill a
        matrix of one row."""
        from octavo.quantization.base import StoredWeight  # a shape alone needs no numpy

        if self.shape == (1, *weight.shape) and isinstance(weight, StoredWeight):
            weight = StoredWeight(weight.type, weight.data, self.shape)
        if weight.shape != self.shape:
            raise ShapeMismatch(f"the shape is {list(weight.shape)}, not {list(self.shape)}")
        self._value = self._in_float32(weight) if self.exact else weight

    def _in_float32(self, weight: Weight) -> Any:
        import numpy as np

        from octavo.quantization.base import stored_floats

        values = weight.dequantize() if weight.is_quantized else weight.floats()
        # Float32 is copied too: reading a page of the file for every norm would be slower.
        values = values + np.float32(self.plus)
        values = (values.T * np.asarray(self.times, dtype=np.float32)).T
        if len(self.shape) != 2:
            return values
        return stored_floats(values)

    def holding(self, value: Any) -> Parameter:
        """Return a copy of the parameter that holds ``value``."""
        parameter = Parameter(*self.shape, exact=self.exact, plus=self.plus, times=self.times)
        parameter._value = value
        return parameter

    def share(self, other: Parameter) -> None:
        """Hold the same value as another loaded parameter, as tied weights do."""
        assert self.shape == other.shape and self.exact == other.exact
        self._value = other.value
