"""A parameter that knows how to take its weight from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.quantization.base import Weight


class ShapeMismatch(ValueError):
    """A weight does not have the shape of its parameter; the loader adds the file and the name."""


class Parameter:
    """The place of one weight in a layer: its shape and, once loaded, its value.

    ``exact`` parameters (norms, biases: small, and added or multiplied element by element; routers,
    where what is nearly equal decides) are kept in float32. ``plus`` is added to them, for
    checkpoints that store a weight less one, and they are multiplied with ``times``, a number or
    one for each row, for models that scale what they multiply.
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
        """What the ops are handed: a ``Weight`` as it is in its file; where it is ``exact``, a
        float32 array, or of a matrix a ``Weight`` in float32. In a model ``with_tensors``, tensors
        of PyTorch's in place of all of them."""
        assert self._value is not None, "a forward pass before the model was loaded"
        return self._value

    def load(self, weight: Weight) -> None:
        """Take ``weight``; ShapeMismatch if it is not of this shape. A matrix of one row may be
        stored as a vector."""
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
        # A copy even of float32: reading a page of the file for every norm would be slower.
        values = values + np.float32(self.plus)
        values = (values.T * np.asarray(self.times, dtype=np.float32)).T
        if len(self.shape) != 2:
            return values
        return stored_floats(values)

    def holding(self, value: Any) -> Parameter:
        """The same parameter with its value in another form."""
        parameter = Parameter(*self.shape, exact=self.exact, plus=self.plus, times=self.times)
        parameter._value = value
        return parameter

    def share(self, other: Parameter) -> None:
        """Hold the same value as a loaded parameter: tied weights."""
        assert self.shape == other.shape and self.exact == other.exact
        self._value = other.value
