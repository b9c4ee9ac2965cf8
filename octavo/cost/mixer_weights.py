"""The matrices of mixers, and how devices share them: by heads."""

from __future__ import annotations

from octavo.cost.weight_shape import Split, WeightShape


def columns(name: str, op: str, heads: int, dim: int, inputs: int) -> WeightShape:
    """``dim`` outputs of each head."""
    return WeightShape(name, "attention", heads * dim, inputs, op, Split.OUTPUTS, heads)


def rows(name: str, op: str, outputs: int, heads: int, dim: int) -> WeightShape:
    """``dim`` inputs of each head."""
    return WeightShape(name, "attention", outputs, heads * dim, op, Split.INPUTS, heads)


def whole(name: str, op: str, outputs: int, inputs: int) -> WeightShape:
    """That every device has."""
    return WeightShape(name, "attention", outputs, inputs, op)


def vector(name: str, heads: int, dim: int) -> WeightShape:
    """A vector that is cut as its heads are."""
    return WeightShape(name, "norm", heads * dim, split=Split.OUTPUTS, units=heads)
