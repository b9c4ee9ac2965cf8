"""Makes quantized models: rounding to nearest, GPTQ, AWQ, AutoRound, rotations, mixes.

    from octavo.quantize import Scheme, quantize_to_nearest

    scheme.py       bits, groups, zeros
    grid.py         what a group of weights can be, and the nearest of that
    calibration.py  text as windows of tokens
    observers.py    a model run layer by layer, and what its linears are handed
    gptq.py         codes that make up for each other's errors
    rotation.py     a checkpoint whose residual stream is rotated, by matrices of hadamard.py
    scaling.py      scales of input channels, folded into the op before
    awq.py          such scales for rounded weights
    smoothquant.py  such scales for rounded weights and activations
    autoround.py    codes and scales of a whole layer, learned together by gradients
    distillation.py how far a model with other weights is from itself, and its gradient
    fake_quant.py   quantized matrices in training
    qat.py          scales of a whole model, trained on what it says itself
    pipeline.py     from a checkpoint to quantized matrices, one after the other
    candidates.py   what a matrix of a mix may become
    sensitivity.py  what that would cost, as KL divergence
    allocation.py   the least cost for a size
    mixture.py      a mix for a target of bits per weight
    tables.py       FP8 and NF4
    resume.py       what is kept of a run that was ended
    recipes.py      methods, formats, defaults
    writers/        the formats
    job.py          from a model to a smaller one on disk
    explore.py      what a scheme makes of some rows, as data; named_schemes.py has the schemes

It computes with PyTorch. To load a file that it has written nothing of this is needed. Importing
this package is cheap: each name below brings in its module, and PyTorch, when it is first used.
"""

from __future__ import annotations

from typing import Any

from octavo.base.lazy_exports import named
from octavo.base.optional_deps import need_torch

_HOMES = {
    "QuantizedMatrix": "octavo.quantize.grid",
    "RotatedCheckpoint": "octavo.quantize.rotation",
    "Scheme": "octavo.quantize.scheme",
    "bits_against_error": "octavo.quantize.explore",
    "calibration_windows": "octavo.quantize.calibration",
    "explore": "octavo.quantize.explore",
    "input_statistics": "octavo.quantize.layerwise_model",
    "quantize_gptq": "octavo.quantize.gptq:gptq",
    "quantize_model": "octavo.quantize.pipeline",
    "quantize_to_nearest": "octavo.quantize.grid",
    "rows_of": "octavo.quantize.explore",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    try:
        return named(__name__, _HOMES, name)
    except ModuleNotFoundError:
        need_torch(f"octavo.quantize.{name}")  # says how to get it, if that is what is missing
        raise


def __dir__() -> list[str]:
    return __all__
