"""Fake quantization, matrices whose scales and optionally codes are trained.

The model computes in training with the values that a file will hold. A group's weights are::

    w = s f (q - z)          s the scale at the start, f > 0 its factor, z an integer

The gradient by the factor f is exact: codes q do not depend on it, so weights move with their
scale. (In LSQ, Esser et al. 2019, arXiv 1902.08153, a weight stays, and its code changes with the
scale.) If codes are trained too, each is the rounded *place* p, a real number::

    q = clamp(round(p), 0, 2^b - 1)

Rounding counts as the identity in gradients (straight-through, Bengio et al. 2013, arXiv
1308.3432); the clamp has its own gradient: none for a place beyond the last code.

Places are in units of codes, and factors relative to a scale, so that one learning rate fits all
matrices of all models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.quantize.grid import QuantizedMatrix, as_scales, grouped

# The farthest that a place starts from its code: at half a step the first update would change the
# code.
_NEAR = 0.4

# The range of the factors of the initial scales.
_FACTORS = 0.25, 4.0


class ScaledMatrix:
    """A matrix whose scales are trained. Its codes are those of ``start``, with integer zeros.

    The optimizer changes ``factors``, float32 [N, G] like ``start.scales`` (one for a matrix that
    is a single group).
    """

    def __init__(self, start: QuantizedMatrix):
        self._start, self.scheme = start, start.scheme
        # Groups as ``grouped`` has them: [N, G, L], or [1, 1, N * K] if there is one.
        self._codes = grouped(start.codes, start.scheme)
        rows = len(self._codes)
        self._scales, self._zeros = start.scales[:rows], start.zeros[:rows]
        self.factors = torch.ones_like(self._scales)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The trained tensors by their kind."""
        return {"factors": self.factors}

    def weight(self) -> Tensor:
        """The current weight, float32 [N, K], differentiable by the trained tensors."""
        steps = self._codes_now() - self._zeros[..., None]
        return (steps * self._scales_now()[..., None]).view(self._start.shape)

    @torch.no_grad()
    def quantized(self) -> QuantizedMatrix:
        """The current matrix as a file holds it; its ``dequantize()`` equals ``weight()``."""
        rows = self._start.shape[0]
        codes = self._codes_now().to(torch.uint8).view(self._start.shape)
        scales = self._scales_now().expand(rows, -1).contiguous()
        return QuantizedMatrix(codes, scales, self._start.zeros, self.scheme)

    def _codes_now(self) -> Tensor:
        return self._codes.float()

    def _scales_now(self) -> Tensor:
        scales: Tensor = _StraightThrough.apply(
            as_scales, self._scales * self.factors.clamp(*_FACTORS)
        )
        return scales


class FakeQuantMatrix(ScaledMatrix):
    """A matrix whose scales and codes are trained, codes by ``places``, float32 [N, G, L].

    Args:
        weight: float32 [N, K]; places start as near to it as the codes of ``start`` allow.
    """

    def __init__(self, start: QuantizedMatrix, weight: Tensor):
        super().__init__(start)
        places = grouped(weight, start.scheme) / self._scales[..., None] + self._zeros[..., None]
        codes = self._codes.float()
        self.places = torch.maximum(torch.minimum(places, codes + _NEAR), codes - _NEAR)

    @property
    def trained(self) -> dict[str, Tensor]:
        return {"factors": self.factors, "places": self.places}

    def _codes_now(self) -> Tensor:
        rounded: Tensor = _StraightThrough.apply(torch.round, self.places)
        return rounded.clamp(0, self.scheme.max_code)


class _StraightThrough(torch.autograd.Function):
    """Applies a function whose gradient counts as that of the identity."""

    @staticmethod
    def forward(ctx: Any, function: Any, values: Tensor) -> Tensor:
        result: Tensor = function(values)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
