"""Quantization-aware training of a whole model's scales, by distillation from the float model.

Training starts from GPTQ's matrices. The quantized model is trained end to end to predict the
tokens that the float model predicts (``distillation.py``). A step uses two windows, and Adam
(Kingma and Ba 2014, arXiv 1412.6980) moves the scale of each group, or with ``codes`` also the
places that codes are rounded from (``fake_quant.py``). Rates rise for a twentieth of the steps,
then fall to 0 as a cosine.

Some windows are held out from GPTQ and from training. The divergence on them is measured several
times, and the best matrices are returned: on these windows they are never worse than GPTQ.

Sources: Liu et al. 2023, "LLM-QAT" (arXiv 2305.17888), for the float model as the teacher; Chen et
al. 2024, "EfficientQAT" (arXiv 2407.11062), for scales alone after codes were chosen layer by
layer. A text of some 100,000 tokens is enough to train scales, which 32 weights or more share, but
not codes: many are moved over an edge by chance, which undoes the compensation of GPTQ. So codes
need far more text and time.

Beside the model's file it takes 9 bytes for each weight of a layer (its code, its value, and the
gradient), with ``codes`` 21 (also its place, and the two moments of Adam); and the activations of
one window in all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.layers.module import named_parameters
from octavo.layers.tensors import with_tensors
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.loader import load_checkpoint
from octavo.models.registry import CausalLM
from octavo.quantize.calibration import in_epochs
from octavo.quantize.distillation import Distillation
from octavo.quantize.fake_quant import FakeQuantMatrix, ScaledMatrix
from octavo.quantize.grid import QuantizedMatrix, Scheme
from octavo.quantize.layerwise_model import dense
from octavo.quantize.pipeline import MatrixReport, SchemeOf, quantize_model
from octavo.system.machine import cpu

# Tokens of all steps by default, but at most so many epochs.
TRAIN_TOKENS = 1 << 19
_MOST_EPOCHS = 8

_WINDOWS_OF_A_STEP = 2
# The highest learning rates: of factors relative to a scale, of places in steps between codes.
_RATES = {"factors": 0.003, "places": 0.003}
# With two bits errors are larger, and rates doubled, as in EfficientQAT.
_TWO_BIT_RATE = 2
_BETAS = 0.9, 0.95
# Gradients of a mean over many tokens and weights are small: far below any that matters.
_EPSILON = 1e-12
_RISE = 0.05

# Evaluations on held-out windows after the one before training, and the most windows of these.
_EVALUATIONS = 8
_HELD_OUT = 8
# The most windows that GPTQ is calibrated on.
_WINDOWS_OF_START = 32

# Processors with one of these multiply bfloat16 faster than float32.
_FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


class QatStepReport(NamedTuple):
    """A finished step, number ``number`` of ``total``.

    ``divergence``: the mean of its windows before the step, in nats. ``held_out``: that of the
    held-out windows at the latest evaluation.
    """

    number: int
    total: int
    divergence: float
    held_out: float


OnStep = Callable[[QatStepReport], None]


def train_model(
    model: str | Path | Checkpoint,
    scheme: Scheme | SchemeOf,
    calibration: Tensor,
    *,
    codes: bool = False,
    tokens: int | None = None,
    seed: int = 0,
    on_matrix: Callable[[MatrixReport], None] | None = None,
    on_step: OnStep = lambda report: None,
) -> dict[str, QuantizedMatrix]:
    """Quantize and train the linears of a model's layers; returns them by parameter.

    Args:
        model: a checkpoint of any format that can be loaded, by its path or open.
        scheme: one for all, or a function of the parameter's name.
        calibration: windows of tokens, int64 [W, length], two or more; some are held out.
        codes: whether codes are trained too, and not scales alone.
        tokens: tokens of all steps, at least a window: the windows that are not held out are
            repeated as needed. None is 524,288, or eight epochs if that is less.
        seed: draws the held-out windows, and the order of the others.
        on_matrix: called with each matrix that GPTQ makes at the start.
        on_step: called with each step.

    Raises:
        ConfigError: fewer than two windows, ``tokens`` less than a window, a scheme whose zeros are
            not integers, or for the reasons of ``quantize_model``.
        ModelError: for the reasons of ``quantize_model``.
    """
    if len(calibration) < 2:
        raise ConfigError(
            "training holds out a part of its text, and this is a single window: give a longer text"
        )
    if tokens is not None and tokens < calibration.shape[1]:
        raise ConfigError(
            f"a window has {calibration.shape[1]:,} tokens, and training is to see {tokens:,}: "
            "give it more"
        )
    checkpoint = open_checkpoint(model) if isinstance(model, str | Path) else model
    scheme_of = _of_integers((lambda name: scheme) if isinstance(scheme, Scheme) else scheme)
    windows = split(calibration, seed)
    if tokens is None:
        tokens = min(TRAIN_TOKENS, _MOST_EPOCHS * windows.trained.numel())
    seen = windows.trained[:_WINDOWS_OF_START]
    start: dict[str, QuantizedMatrix] = {}
    for name, matrix in quantize_model(checkpoint, scheme_of, "gptq", seen, on_matrix=on_matrix):
        assert isinstance(matrix, QuantizedMatrix)
        start[name] = matrix
    loaded = load_checkpoint(checkpoint, checkpoint.config())
    matrices = _in_training(start, loaded if codes else None)
    is_fast = not _FAST_BFLOAT16.isdisjoint(cpu().isa)
    dtype = torch.bfloat16 if is_fast else torch.float32
    distillation = Distillation(loaded, calibration.shape[1], dtype)
    return train(distillation, matrices, windows, tokens=tokens, seed=seed, on_step=on_step)


def _of_integers(scheme_of: SchemeOf) -> SchemeOf:
    """Wrap ``scheme_of`` to raise a ConfigError for schemes that cannot be trained."""

    def checked(name: str) -> Scheme | None:
        scheme = scheme_of(name)
        if scheme is not None and (scheme.float_minimum or scheme.table is not None):
            raise ConfigError("training needs integer codes and zeros: give such a scheme")
        return scheme

    return checked


def _in_training(
    start: Mapping[str, QuantizedMatrix], model: CausalLM | None
) -> dict[str, ScaledMatrix]:
    """The matrices in training. With a model, codes are trained too, starting from its weights."""
    if model is None:
        return {name: ScaledMatrix(matrix) for name, matrix in start.items()}
    parameters = dict(named_parameters(with_tensors(cast(Any, model))))
    return {
        name: FakeQuantMatrix(matrix, dense(parameters[name].value))
        for name, matrix in start.items()
    }


class TrainingWindows(NamedTuple):
    """The windows that are trained on, and those that are held out, int64 [W, length] each."""

    trained: Tensor
    held_out: Tensor


def split(windows: Tensor, seed: int) -> TrainingWindows:
    """Hold out an eighth of the windows, at least one and at most eight."""
    count = min(_HELD_OUT, max(1, len(windows) // 8))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return TrainingWindows(windows[order[count:]], windows[order[:count]])


def train(
    distillation: Distillation,
    matrices: Mapping[str, ScaledMatrix],
    windows: TrainingWindows,
    *,
    tokens: int,
    seed: int = 0,
    on_step: OnStep = lambda report: None,
) -> dict[str, QuantizedMatrix]:
    """Train ``matrices`` in place, and return the best quantized ones."""
    num_windows = tokens // windows.trained.shape[1]
    total = -(-num_windows // _WINDOWS_OF_A_STEP)
    evaluated = {math.ceil(total * i / _EVALUATIONS) for i in range(1, _EVALUATIONS + 1)}
    optimizer = _Optimizer(matrices.values(), total)
    best = _BestWeights(distillation, windows.held_out)
    best.evaluate(matrices)
    order = in_epochs(len(windows.trained), num_windows, seed)
    drawn = windows.trained[order].split(_WINDOWS_OF_A_STEP)
    for number, batch in enumerate(drawn, start=1):
        divergence = _gradients(distillation, matrices, batch)
        optimizer.step()
        if number in evaluated:
            best.evaluate(matrices)
        on_step(QatStepReport(number, total, divergence, best.latest))
    return best.matrices


def _gradients(
    distillation: Distillation, matrices: Mapping[str, ScaledMatrix], batch: Tensor
) -> float:
    """Compute the gradient of the mean divergence on a batch [B, length], and return the latter.

    All windows are run with the same weights. Their summed gradient goes through the rounding once
    for each matrix.
    """
    weights = _weights(matrices)
    for weight in weights.values():
        weight.requires_grad_()
    total = sum(distillation.add_gradient(weights, window) for window in batch)
    for name, matrix in matrices.items():
        gradient = weights.pop(name).grad
        assert gradient is not None
        matrix.weight().backward(gradient.div_(len(batch)))
    return total / len(batch)


@torch.no_grad()
def _weights(matrices: Mapping[str, ScaledMatrix]) -> dict[str, Tensor]:
    return {name: matrix.weight() for name, matrix in matrices.items()}


class _Optimizer:
    """Adam with learning rates that rise and fall over ``total`` steps."""

    def __init__(self, matrices: Iterable[ScaledMatrix], total: int):
        self._total, self._number = total, 0
        trained = [
            (values.requires_grad_(), _rate(kind, matrix.scheme))
            for matrix in matrices
            for kind, values in matrix.trained.items()
        ]
        self._rates = [rate for _, rate in trained]
        self._adam = torch.optim.Adam(
            [{"params": [values]} for values, _ in trained], betas=_BETAS, eps=_EPSILON
        )

    def step(self) -> None:
        """Update all values by their gradients, which are cleared."""
        fall = (1 + math.cos(math.pi * self._number / self._total)) / 2
        self._number += 1
        part = fall * min(1.0, self._number / max(1, round(_RISE * self._total)))
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = part * rate
        self._adam.step()
        self._adam.zero_grad()


def _rate(kind: str, scheme: Scheme) -> float:
    return _RATES[kind] * (_TWO_BIT_RATE if scheme.bits == 2 else 1)


class _BestWeights:
    """The matrices of least divergence on held-out windows, among those that were evaluated."""

    def __init__(self, distillation: Distillation, windows: Tensor):
        self.matrices: dict[str, QuantizedMatrix] = {}
        self.latest = math.inf
        self._distillation, self._windows, self._least = distillation, windows, math.inf

    def evaluate(self, matrices: Mapping[str, ScaledMatrix]) -> None:
        weights = _weights(matrices)
        each = [self._distillation.divergence(weights, window) for window in self._windows]
        self.latest = sum(each) / len(each)
        if not self.matrices or self.latest < self._least:
            self._least = self.latest
            self.matrices = {name: matrix.quantized() for name, matrix in matrices.items()}
