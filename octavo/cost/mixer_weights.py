"""The matrices and vectors of mixers, by the heads that devices share out.

`octavo.models.tensor_split` says along which axis a tensor is shared, by its name.
"""

from __future__ import annotations

from octavo.cost.weight_shape import WeightShape


def columns(name: str, op: str, heads: int, dim: int, inputs: int) -> WeightShape:
    """A matrix to ``dim`` outputs of each head."""
    return WeightShape(name, "attention", heads * dim, inputs, op, heads)


def rows(name: str, op: str, outputs: int, heads: int, dim: int) -> WeightShape:
    """A matrix from ``dim`` inputs of each head."""
    return WeightShape(name, "attention", outputs, heads * dim, op, heads)


def whole(name: str, op: str, outputs: int, inputs: int) -> WeightShape:
    """A matrix that has no heads."""
    return WeightShape(name, "attention", outputs, inputs, op)


def vector(name: str, heads: int, dim: int) -> WeightShape:
    """A vector of ``dim`` values of each head."""
    return WeightShape(name, "norm", heads * dim, units=heads)
