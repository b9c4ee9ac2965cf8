"""A linear layer over two concatenated vectors, [a, b], computed without concatenating them."""

from __future__ import annotations

from octavo.layers.context import Activations, ForwardContext
from octavo.layers.linear import Linear
from octavo.layers.module import Module
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import row_bytes
from octavo.speculation.head_folder import Tensors


class PairLinear(Module):
    """W [a, b] as W_a a + W_b b, with W cut between the columns of both."""

    def __init__(self, first_size: int, second_size: int, out_features: int):
        self.first = Linear(first_size, out_features)
        self.second = Linear(second_size, out_features)

    def forward(self, pair: tuple[Activations, Activations], ctx: ForwardContext) -> Activations:
        a, b = pair
        return ctx.ops.add(self.first(a, ctx), self.second(b, ctx))

    def load(self, tensors: Tensors, name: str) -> None:
        """Load both halves from one tensor. ModelFileError if its shape is another."""
        (rows, split), (_, rest) = self.first.weight.shape, self.second.weight.shape
        weight = tensors.matrix(name, rows, split + rest)
        self.first.weight.load(columns(weight, 0, split))
        self.second.weight.load(columns(weight, split, split + rest))


def columns(weight: StoredWeight, start: int, stop: int) -> StoredWeight:
    """Columns ``start`` to ``stop`` of a matrix of floats."""
    begin, end = row_bytes(weight.type, start), row_bytes(weight.type, stop)
    return StoredWeight(weight.type, weight.data[:, begin:end], (weight.shape[0], stop - start))
