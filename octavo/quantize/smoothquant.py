"""SmoothQuant, scales of input channels for 8-bit weights and 8-bit activations.

Activations have outlier channels, and where the values of a token share a scale, the small ones are
rounded to few levels. Dividing outlier channels makes activations easier to round, and weights,
which are easy, a little harder. The search tries for each channel

    s = max|x|^a / max|w|^(1 - a)        a = 0.3, 0.4, ... 0.9

w being its column in all linears that share the input. The error is the squared error of their
outputs on some tokens of the text, with rounded weights and with activations of 8 bits and a scale
for each token. Scales are folded into norms only, as in the paper.

Source: Xiao et al. 2022, "SmoothQuant" (arXiv 2211.10438), where a is a setting of the whole model.

KL divergence of SmolLM2 135M on WikiText-2, without scales and with them: 0.030 and 0.013 with one
scale for each token, 0.0061 and 0.0050 with octavo's 8-bit activations, which have a scale for each
group. With float activations scales are worse, 0.0020 and 0.0032: use rtn for those.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.quantize.channel_scaling import Scaling, SharedInputLinears, centred, positive
from octavo.quantize.grid import quantize_to_nearest

_EXPONENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

# Tokens, spread over the text, on which outputs are compared.
_NUM_TOKENS = 512

_MAX_INT8 = 127


class _SmoothQuantCriterion:
    """The ``ScalingCriterion`` of SmoothQuant: the error of outputs with both sides rounded."""

    def __init__(self, linears: SharedInputLinears):
        self._linears = linears
        self._second_moment = linears.x.square().mean(dim=0)
        self._x = linears.x[:: max(1, len(linears.x) // _NUM_TOKENS)]

    def candidates(self) -> Iterator[Tensor]:
        of_input = positive(self._linears.x.abs().amax(dim=0))
        of_weight = positive(torch.cat(self._linears.weights).abs().amax(dim=0))
        for exponent in _EXPONENTS:
            yield centred(of_input**exponent / of_weight ** (1 - exponent))

    def loss(self, scales: Tensor, rows_apart: int = 1) -> float:
        importance = self._second_moment / scales.square()
        x = round_tokens(self._x / scales)
        total = 0.0
        for weight, scheme in zip(self._linears.weights, self._linears.schemes, strict=True):
            rows = weight[::rows_apart]
            rounded = quantize_to_nearest(rows * scales, scheme, search=True, importance=importance)
            error = x @ rounded.dequantize().t() - self._x @ rows.t()
            total += float(error.square().sum())
        return total


def round_tokens(x: Tensor) -> Tensor:
    """Round activations [T, K] to 8 bits with a scale for each token, whose largest code is 127."""
    steps = x.abs().amax(dim=1, keepdim=True) / _MAX_INT8
    return torch.where(steps > 0, (x / steps).round_() * steps, 0.0)


SMOOTHQUANT = Scaling(_SmoothQuantCriterion, norms_only=True)
