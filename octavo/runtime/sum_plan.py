"""The plan of one rank's step by the scheme `sum`, and the parts of weights that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.kernels.fused_ops import FusedAttention, WeightRef
from octavo.kernels.parts import Part
from octavo.kernels.sum_division import MatrixPart, SumDivision
from octavo.models.config import KVSpec
from octavo.quantization.base import Weight
from octavo.quantization.columns import columns_of, input_unit
from octavo.runtime.op_program import StepPlan


class RankPlan(NamedTuple):
    """The plan of a rank, its parts of the weights by their names in it, the layers of its KV
    cache, and those of the rank of its group that has most."""

    plan: StepPlan
    weights: dict[str, Weight]
    kv_layers: Sequence[KVSpec]
    most_kv_layers: Sequence[KVSpec]


def divide(
    plan: StepPlan,
    weights: dict[str, Weight],
    kv_layers: Sequence[KVSpec],
    part: Part,
    is_canonical: bool,
) -> RankPlan:
    """Return the plan of a rank, given that of the whole model.

    Raises:
        CannotFuse: so many ranks cannot share sums out.
        UnsupportedModelError: a weight has inputs that cannot be shared out.
    """
    if part.is_whole and not is_canonical:
        return RankPlan(plan, weights, kv_layers, kv_layers)

    def whole(matrix: WeightRef) -> Weight:
        return weights[plan.name_of(matrix)]

    def name_of(matrix: WeightRef) -> str:
        if isinstance(matrix, MatrixPart):
            return plan.name_of(matrix.of) + matrix.name
        return plan.name_of(matrix)

    def unit_of(matrix: WeightRef) -> int:
        try:
            return input_unit(whole(matrix))
        except UnsupportedModelError:
            if part.is_whole:
                return matrix.shape[1]  # one slice: it cannot be run otherwise
            raise

    division = SumDivision(plan.ops, part, unit_of, is_canonical)
    own = StepPlan(division.ops, name_of)
    parts = {}
    for matrix in own.matrices():
        if isinstance(matrix, MatrixPart):
            parts[name_of(matrix)] = part_of(whole(matrix.of), matrix)
        else:
            parts[name_of(matrix)] = whole(matrix)
    own_layers, most_layers = kv_layers, kv_layers
    if division.most_kv_heads is not None:
        heads = next(op.k.shape[0] for op in own.ops if isinstance(op, FusedAttention))
        own_layers = _of_heads(kv_layers, heads)
        most_layers = _of_heads(kv_layers, division.most_kv_heads)
    return RankPlan(own, parts, own_layers, most_layers)


def _of_heads(layers: Sequence[KVSpec], num_kv_heads: int) -> list[KVSpec]:
    return [replace(layer, num_kv_heads=num_kv_heads) for layer in layers]


def part_of(weight: Weight, part: MatrixPart) -> Weight:
    """Return the rows and columns of a weight that a part names."""
    if len(part.rows) == 1:
        weight = weight.narrow(part.rows[0].start, part.rows[0].stop)
    else:
        weight = weight.select(np.concatenate([np.arange(r.start, r.stop) for r in part.rows]))
    return weight if len(part.columns) == weight.shape[1] else columns_of(weight, part.columns)
