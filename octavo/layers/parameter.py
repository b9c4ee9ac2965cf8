"""A parameter that knows how to take its tensor from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from octavo.quantization.base import QuantizedWeight, Weight

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ShapeMismatch(ValueError):
    """A tensor does not have the shape of its parameter; the loader adds the file and the name."""


class Parameter:
    """The place of one weight in a layer: its shape and, once loaded, its value.

    It is not a ``torch.nn.Parameter``: there are no gradients, and the value may stay quantized.

    ``exact`` parameters (norms, biases: small, and added or multiplied element by element) are
    kept in float32. ``plus`` is added to them, for checkpoints that store a weight less one.
    """

    __slots__ = ("_value", "exact", "plus", "shape")

    def __init__(self, *shape: int, exact: bool = False, plus: float = 0.0):
        self.shape = shape
        self.exact = exact
        self.plus = plus
        self._value: Weight | None = None

    @property
    def is_loaded(self) -> bool:
        return self._value is not None

    @property
    def value(self) -> Weight:
        """The weight; a matrix may be quantized, anything ``exact`` is a float32 tensor."""
        assert self._value is not None, "a forward pass before the model was loaded"
        return self._value

    @property
    def tensor(self) -> Tensor:
        """The value of an ``exact`` parameter."""
        assert isinstance(self._value, Tensor), "not loaded, or quantized"
        return self._value

    def load(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        """Take ``weight``, moved to ``device``; ShapeMismatch if it is not of this shape.

        On the CPU a weight is kept as it is, so that a mapped file is never copied. Elsewhere an
        unquantized matrix is converted to ``dtype``, that of the activations.
        """
        if tuple(weight.shape) != self.shape:
            raise ShapeMismatch(f"the shape is {list(weight.shape)}, not {list(self.shape)}")
        if self.exact:
            if isinstance(weight, QuantizedWeight):
                weight = weight.dequantize()
            # A copy even of float32: reading a page of the file for every norm would be slower.
            self._value = weight.to(device, torch.float32, copy=True) + self.plus
        elif isinstance(weight, QuantizedWeight):
            self._value = weight if device.type == "cpu" else weight.to(device)
        else:
            self._value = weight if device.type == "cpu" else weight.to(device, dtype)

    def share(self, other: Parameter) -> None:
        """Hold the same value as a loaded parameter: tied weights."""
        assert self.shape == other.shape and self.exact == other.exact
        self._value = other.value


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Every parameter of a model with its dotted name, in the order of definition."""
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Parameter):
                yield f"{prefix}.{attribute}".lstrip("."), value
