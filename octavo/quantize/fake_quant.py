"""Quantized matrices in training: scales alone, or codes too by a straight-through gradient.

What a model computes with in training is what a file will hold. A group's weights are::

    w = s f (q - z)          s the scale at the start, f > 0 its factor, z an integer

By the factor f the gradient is exact: codes q do not depend on it, a scale that moves takes its
weights along. (In LSQ, Esser et al. 2019, arXiv 1902.08153, a weight stays, and its code moves when
the scale does.) Where codes are trained too, each is that of a *place* p, a real number::

    q = clamp(round(p), 0, 2^b - 1)

Rounding counts as the identity in gradients (Bengio et al. 2013, arXiv 1308.3432), and the clamp as
what it is: a place that lies beyond the last code gets no gradient.

Places are in units of codes, and factors in parts of a scale: so one rate fits all matrices of all
models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.quantize.grid import QuantizedMatrix, as_scales, grouped

# Where a place is at first: within half a step of the code, and not at the edge, where the first
# step would take it away.
_NEAR = 0.4

# Scales leave those of the start no further than by these factors.
_FACTORS = 0.25, 4.0


class ScaledMatrix:
    """A matrix in training whose codes stay: those of ``start``, in a scheme with integer zeros.

    ``factors``, float32 [N, G] as ``start.scales`` (one for a matrix that is a single group), are
    what an optimizer moves.
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
        """What an optimizer moves, by what it is."""
        return {"factors": self.factors}

    def weight(self) -> Tensor:
        """What it is now, float32 [N, K], with gradients by what requires them."""
        steps = self._codes_now() - self._zeros[..., None]
        return (steps * self._scales_now()[..., None]).view(self._start.shape)

    @torch.no_grad()
    def quantized(self) -> QuantizedMatrix:
        """The same as a file holds it: ``dequantize()`` of it is ``weight()``."""
        rows = self._start.shape[0]
        codes = self._codes_now().to(torch.uint8).view(self._start.shape)
        scales = self._scales_now().expand(rows, -1).contiguous()
        return QuantizedMatrix(codes, scales, self._start.zeros, self.scheme)

    def _codes_now(self) -> Tensor:
        return self._codes.float()

    def _scales_now(self) -> Tensor:
        scales: Tensor = _Through.apply(as_scales, self._scales * self.factors.clamp(*_FACTORS))
        return scales


class FakeQuantMatrix(ScaledMatrix):
    """The same, but codes are trained too, by ``places``: float32 [N, G, L].

    Args:
        weight: float32 [N, K]; places begin as near to it as they can with the codes of ``start``.
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
        rounded: Tensor = _Through.apply(torch.round, self.places)
        return rounded.clamp(0, self.scheme.max_code)


class _Through(torch.autograd.Function):
    """A function whose gradient is taken for that of the identity."""

    @staticmethod
    def forward(ctx: Any, function: Any, values: Tensor) -> Tensor:
        result: Tensor = function(values)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
