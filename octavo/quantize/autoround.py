"""Codes of a decoder layer that are learned together, by gradients (SignRound, in AutoRound).

A weight w on a grid of scale s and zero z becomes s (q - z) with the code::

    q = clamp(round(w / s + z + v), 0, 2^b - 1)        v, the offset, in [-1/2, 1/2]

so that an offset can move a weight to either of its neighbours on the grid. Offsets of all weights,
and a factor for each group's scale, are moved step by step against the gradient of the error of the
whole layer's output. Rounding and clamping count as the identity in it (inside the range), so with
g the gradient by the rounded weight, of which autograd has no more to find::

    by the offset: s g                  by the scale: sum of g (q - z - w / s)

and as only signs are used, the factor s > 0 of the first is left out. All take steps of one size,
from 2 / n down to 0 in a line: n of them can take an offset from one end to the other.

Source: Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent" (arXiv
2309.05516). Decided otherwise than there:

- The layer is fed what quantized layers before it make, and aims at what the *float* model has at
  its end. So it makes up for their errors too, as far as it can.
- The error of a token is relative to the size of its hidden state: norms will divide by that, and
  otherwise the few tokens with huge activations would be all that is looked at.
- It starts from codes of GPTQ, on grids that were searched. A weight is first moved to where it
  has such a code, but no further than it takes.
- Zeros stay as they are, and one factor takes the place of one for each end of the range.

Measured with the first four layers of SmolLM2 135M quantized, asymmetric in groups of 32, 64 steps
on 16 windows of 512 tokens: the KL divergence of the whole model is 0.215 at 2 bits, of GPTQ 0.258.
At 3 bits it is 0.061 against 0.051: why is not known yet. So it is for 2 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.quantize.grid import Grid, QuantizedMatrix, as_scales, grouped

Layer = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(hidden states of whole windows, float32 [tokens, hidden], weights float32 [N, K] by name) -> the
hidden states after the layer, with gradients by the weights."""

# Windows that are looked at to find the best, at most.
_WINDOWS_OF_A_LOOK = 16

# The first step, in units of 1 / steps. It is 1 in the paper, which takes more of them: with 50, in
# layer 3 of SmolLM2 135M at 2 bits, 2 leaves 1.4 % less error on other text.
_FIRST_STEP = 2.0

# What a token's size is taken for at least, as a part of the mean: none is divided by zero.
_LEAST_SIZE = 1e-6

# Within half a step of the code, and not at the edge, where the first step would take it away.
_NEAR = 0.4

# Scales leave the searched ones no further than by these factors.
_FACTORS = 0.5, 1.5


class LayerSamples(NamedTuple):
    """What goes into a layer and what should come out: float32 [W, length, hidden] each."""

    inputs: Tensor
    targets: Tensor


def learn_rounding(
    layer: Layer,
    windows: LayerSamples,
    weights: Mapping[str, Tensor],
    start: Mapping[str, QuantizedMatrix],
    *,
    steps: int,
    seed: int = 0,
) -> dict[str, QuantizedMatrix]:
    """The matrices of a layer that bring it closest to its targets, of those that are come by.

    A step looks at one window; windows are drawn by ``seed``, each once before any comes again.
    What is returned is the best, on all windows, of ``start`` and of what is there after a half of
    the steps and after all: never worse than ``start`` on them (the first 16, if there are more).

    Args:
        weights: those that ``start`` was made of, float32 [N, K], by name.
        start: matrices in schemes with integer zeros. Grids and zeros are taken from them.
    """
    sizes = windows.targets.square().mean(dim=-1, keepdim=True)
    sizes.clamp_(min=_LEAST_SIZE * float(sizes.mean()))

    def error(window: int, given: Mapping[str, Tensor]) -> Tensor:
        missed = layer(windows.inputs[window], given) - windows.targets[window]
        return (missed.square() / sizes[window]).mean()

    best = _BestRounding(error, min(len(windows.inputs), _WINDOWS_OF_A_LOOK))
    best.look(start)
    learned = {name: _LearnedMatrix(weights[name], start[name]) for name in start}
    for step, window in enumerate(_drawn(len(windows.inputs), steps, seed)):
        given = {name: matrix.rounded() for name, matrix in learned.items()}
        with torch.enable_grad():
            error(window, given).backward()
        for matrix in learned.values():
            matrix.step(_FIRST_STEP * (1 - step / steps) / steps)
        if step + 1 in (steps // 2, steps):
            best.look({name: matrix.quantized() for name, matrix in learned.items()})
    return best.matrices


def _drawn(num_windows: int, steps: int, seed: int) -> list[int]:
    """A window for each step."""
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-steps // num_windows)
    drawn = [torch.randperm(num_windows, generator=generator) for _ in range(rounds)]
    return torch.cat(drawn)[:steps].tolist()


class _BestRounding:
    """The matrices of least error among those that were looked at."""

    def __init__(self, error: Callable[[int, Mapping[str, Tensor]], Tensor], num_windows: int):
        self.matrices: dict[str, QuantizedMatrix] = {}
        self._error, self._num_windows, self._least = error, num_windows, float("inf")

    @torch.no_grad()
    def look(self, matrices: Mapping[str, QuantizedMatrix]) -> None:
        given = {name: matrix.dequantize() for name, matrix in matrices.items()}
        error = sum(float(self._error(window, given)) for window in range(self._num_windows))
        if not self.matrices or error < self._least:
            self.matrices, self._least = dict(matrices), error


class _LearnedMatrix:
    """Offsets and factors of one matrix, with groups as ``grouped`` has them: [N, G, L], [N, G]."""

    def __init__(self, weight: Tensor, start: QuantizedMatrix):
        self._scheme, self._shape = start.scheme, weight.shape
        values = grouped(weight, self._scheme)
        rows = values.shape[0]  # one, where the matrix is a single group
        self._scales, zeros = start.scales[:rows], start.zeros[:rows]
        self._zeros = zeros[..., None]
        self._values = self._near(values, start.codes.view(values.shape).float())
        self._offsets, self._factors = torch.zeros_like(values), torch.ones_like(self._scales)

    def rounded(self) -> Tensor:
        """The weight as it is now, [N, K], of which a gradient is wanted before the next step."""
        scales = self._scales_now()[..., None]
        self._places = self._values / scales
        codes = (self._places + self._zeros).add_(self._offsets).round_()
        self._inside = (codes >= 0).logical_and_(codes <= self._scheme.max_code)
        self._steps = codes.clamp_(0, self._scheme.max_code).sub_(self._zeros)
        self._rounded = (self._steps * scales).view(self._shape).requires_grad_()
        return self._rounded

    def step(self, size: float) -> None:
        """Move against the gradient, whose autograd has come and gone."""
        assert self._rounded.grad is not None
        by_offset = self._rounded.grad.view(self._values.shape)
        by_factor = (by_offset * self._steps).sum(dim=-1)
        by_offset.mul_(self._inside)
        by_factor -= (by_offset * self._places).sum(dim=-1)
        self._offsets.add_(by_offset.sign_(), alpha=-size).clamp_(-0.5, 0.5)
        self._factors.add_(by_factor.sign_(), alpha=-size).clamp_(*_FACTORS)

    def quantized(self) -> QuantizedMatrix:
        self.rounded()
        codes = (self._steps + self._zeros).to(torch.uint8).view(self._shape)
        rows = self._shape[0]
        grid = Grid(self._scales_now(), self._zeros[..., 0])
        scales, zeros = (each.expand(rows, -1).contiguous() for each in grid)
        return QuantizedMatrix(codes, scales, zeros, self._scheme)

    def _scales_now(self) -> Tensor:
        return as_scales(self._scales * self._factors)

    def _near(self, values: Tensor, codes: Tensor) -> Tensor:
        """Values moved as little as it takes for the nearest codes to be ``codes``."""
        scales = self._scales[..., None]
        places = values / scales + self._zeros
        places = torch.maximum(torch.minimum(places, codes + _NEAR), codes - _NEAR)
        return (places - self._zeros) * scales
