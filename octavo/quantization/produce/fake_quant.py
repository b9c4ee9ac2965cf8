"""Quantized matrices that can be trained: codes by a straight-through gradient, and scales.

A matrix is described by the *places* of its weights between the codes, and a factor of each
group's scale. What a model computes with is what a file will hold::

    q = clamp(round(p), 0, 2^b - 1)        p the place, a real number
    w = s f (q - z)                        f the factor, s the scale at the start, z an integer

Rounding counts as the identity in gradients (Bengio et al. 2013, arXiv 1308.3432), and the clamp as
what it is: a place that lies beyond the last code gets no gradient. By the factor the gradient is
exact, as codes do not depend on scales here: a scale that moves takes its weights along. In LSQ
(Esser et al. 2019, arXiv 1902.08153) a weight stays, and its code moves when the scale does.

That places are in units of codes is what makes one learning rate fit all matrices of all models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.quantization.produce.grid import Grid, QuantizedMatrix, as_scales, grouped

# Where a place is at first: within half a step of the code, and not at the edge, where the first
# step would take it away.
_NEAR = 0.4

# Scales leave those of the start no further than by these factors.
_FACTORS = 0.25, 4.0


class _Through(torch.autograd.Function):
    """A function whose gradient is taken for that of the identity."""

    @staticmethod
    def forward(ctx: Any, function: Any, values: Tensor) -> Tensor:
        result: Tensor = function(values)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, gradient


class FakeQuantMatrix:
    """A matrix in training, in groups as ``grid.grouped`` has them: [N, G, L].

    Args:
        weight: float32 [N, K]; places are as near to it as they can be with the codes of ``start``.
        start: where training begins, in a scheme with integer zeros. Zeros are kept.

    ``places`` float32 [N, G, L] and ``factors`` [N, G] are what an optimizer moves.
    """

    def __init__(self, weight: Tensor, start: QuantizedMatrix):
        self._scheme, self._shape = start.scheme, start.shape
        values = grouped(weight, self._scheme)
        rows = values.shape[0]  # one, where the matrix is a single group
        self._scales, self._zeros = start.scales[:rows], start.zeros[:rows]
        codes = start.codes.view(values.shape).float()
        places = (values / self._scales[..., None]).add_(self._zeros[..., None])
        self.places = torch.maximum(torch.minimum(places, codes + _NEAR), codes - _NEAR)
        self.factors = torch.ones_like(self._scales)

    def weight(self) -> Tensor:
        """What it is now, float32 [N, K], with gradients by places and factors that require them."""
        steps = self._codes() - self._zeros[..., None]
        return (steps * self._scales_now()[..., None]).view(self._shape)

    @torch.no_grad()
    def quantized(self) -> QuantizedMatrix:
        """The same as a file holds it: ``dequantize()`` of it is ``weight()``."""
        rows = self._shape[0]
        codes = self._codes().to(torch.uint8).view(self._shape)
        grid = Grid(self._scales_now(), self._zeros)
        scales, zeros = (each.expand(rows, -1).contiguous() for each in grid)
        return QuantizedMatrix(codes, scales, zeros, self._scheme)

    def _codes(self) -> Tensor:
        rounded: Tensor = _Through.apply(torch.round, self.places)
        return rounded.clamp(0, self._scheme.max_code)

    def _scales_now(self) -> Tensor:
        scales: Tensor = _Through.apply(as_scales, self._scales * self.factors.clamp(*_FACTORS))
        return scales
