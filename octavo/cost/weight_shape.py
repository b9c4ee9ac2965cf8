"""A tensor of a model by its shape, and how devices share it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from octavo.cost.parallel import Parallel
from octavo.cost.rank_model import Experts
from octavo.models.tensor_split import Split, split_of

# Which weights a quantization treats alike. ``router`` has all that is small and decides much.
Part = Literal["embedding", "attention", "mlp", "experts", "router", "norm", "head", "other"]


@dataclass(frozen=True, slots=True)
class WeightShape:
    """A matrix from ``inputs`` values to ``outputs``, or a vector (``inputs`` is 0).

    Args:
        name: within its layer, as Hugging Face's Llama would name it: ``self_attn.q_proj``.
        part: what it is part of.
        op: of which matrix product of a step it is part, such as ``attention.qkv``; empty where
            it is of none, as norms and the embedding are.
        split: follows from the name, see `octavo.models.tensor_split`.
        units: outputs (or inputs) are shared out in so many pieces, such as heads; a piece is
            never cut, and each device has one at least.
        experts: how many of these matrices there are and how many of them a token uses; 1 and 1
            without experts.
        layer: None outside of the layers.
        query_heads: of attention, where it is cut by heads: ``units`` are these, or the KV heads
            that they read. kv_heads: of the same.
    """

    name: str
    part: Part
    outputs: int
    inputs: int = 0
    op: str = ""
    units: int = 0
    experts: int = 1
    experts_per_token: int = 1
    layer: int | None = None
    query_heads: int = 0
    kv_heads: int = 0
    split: Split = field(default=Split.NOTHING, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", split_of(self.name))

    @property
    def num_params(self) -> int:
        return self.experts * self.outputs * max(1, self.inputs)

    @property
    def num_active_params(self) -> int:
        """Number of values that one token uses."""
        return self.num_params // self.experts * self.experts_per_token

    @property
    def has_experts(self) -> bool:
        return self.part == "experts"

    def of_rank(self, parallel: Parallel) -> WeightShape:
        """The share of one device. If experts cannot be split evenly, that of the fuller device."""
        if self.part == "attention" and parallel.dp_attention:
            return self
        ways = parallel.tp
        experts = self.experts
        if self.has_experts and parallel.ep > 1:
            ways = parallel.tp * parallel.dp // parallel.ep
            experts = ceil(experts / parallel.ep)
        outputs, inputs = (parallel if ways == parallel.tp else Parallel(ways)).shares.matrix(self)
        return replace(self, experts=experts, outputs=outputs, inputs=inputs)

    def experts_on(self, parallel: Parallel) -> Experts | None:
        """The experts of this matrix, if a token uses only some."""
        if not self.has_experts:
            return None
        return Experts(self.experts, self.experts_per_token, self.of_rank(parallel).experts)


# -- the matrices and vectors of mixers, by the heads that devices share out ----------------------


def columns(
    name: str, op: str, heads: int, dim: int, inputs: int, query_heads: int = 0, kv_heads: int = 0
) -> WeightShape:
    """A matrix to ``dim`` outputs of each head. ``query_heads``, ``kv_heads``: of attention."""
    return WeightShape(
        *(name, "attention", heads * dim, inputs, op, heads),
        query_heads=query_heads,
        kv_heads=kv_heads,
    )


def rows(name: str, op: str, outputs: int, heads: int, dim: int, kv_heads: int = 0) -> WeightShape:
    """A matrix from ``dim`` inputs of each head. ``kv_heads``: of attention."""
    return WeightShape(name, "attention", outputs, heads * dim, op, heads, kv_heads=kv_heads)


def whole(name: str, op: str, outputs: int, inputs: int) -> WeightShape:
    """A matrix that has no heads."""
    return WeightShape(name, "attention", outputs, inputs, op)


def vector(name: str, heads: int, dim: int) -> WeightShape:
    """A vector of ``dim`` values of each head."""
    return WeightShape(name, "norm", heads * dim, units=heads)
