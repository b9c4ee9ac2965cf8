"""Scales of input channels for integers of 8 bits on both sides of a product (SmoothQuant).

Activations have channels that are far larger than others, and a token whose values share a scale
loses the small ones to them. Dividing these channels leaves less to lose, and makes it harder for
weights, which had it easy. Tried are, for each channel,

    s = max|x|^a / max|w|^(1 - a)        a = 0.3, 0.4, ... 0.9

w being its column of all linears that share the input. The error is the squared one of their
outputs on some tokens of the text, with weights rounded as in the end and activations to 8 bits
with a scale for each token. Only norms take scales, as in the paper.

Source: Xiao et al. 2022, "SmoothQuant" (arXiv 2211.10438), where a is a setting of the whole model.

Divergence of SmolLM2 135M from the original on WikiText-2, without scales and with them: 0.030 and
0.013 where a token has one scale, 0.0061 and 0.0050 with octavo's activations of 8 bits, which have
one for each group. With exact activations scales are a loss, 0.0020 and 0.0032: use rtn for those.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.quantize.channel_scaling import Scaling, SharedInputLinears, centred, positive
from octavo.quantize.grid import quantize_to_nearest

_EXPONENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

# On so many tokens, spread over the text, outputs are compared.
_NUM_TOKENS = 512

_MAX_INT8 = 127


class _ProductError:
    """A criterion; see ``scaling.Criterion``."""

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
    """Activations [T, K] as 8 bits with a scale for each token have them: the largest is 127."""
    steps = x.abs().amax(dim=1, keepdim=True) / _MAX_INT8
    return torch.where(steps > 0, (x / steps).round_() * steps, 0.0)


SMOOTHQUANT = Scaling(_ProductError, norms_only=True)
