"""Quantizes models by round-to-nearest, GPTQ, AWQ, AutoRound, SmoothQuant, QAT, mixed precision.

    from octavo.quantize import Scheme, quantize_to_nearest

    scheme.py            bits, group size, zero points
    grid.py              scales and zeros of groups, and rounding to nearest
    code_tables.py       FP8 and NF4, whose codes are entries of a table
    calibration.py       calibration text as windows of tokens
    layerwise_model.py   a model run layer by layer, and statistics of its linears' inputs
    gptq.py              GPTQ
    awq.py               AWQ: scales of input channels, for rounded weights
    smoothquant.py       SmoothQuant: the same for rounded weights and activations
    channel_scaling.py   the search for such scales, and their folding into the op before
    autoround.py         AutoRound: codes and scales of a layer, learned by gradients
    qat.py               quantization-aware training of a whole model
    distillation.py      its loss: the KL divergence from the float model
    fake_quant.py        its quantized matrices with straight-through gradients
    rotation.py          rotation of the residual stream (QuaRot), by matrices of hadamard.py
    pipeline.py          from a checkpoint to quantized matrices, layer by layer
    mixed_precision.py   bits or types for each matrix, for a target of bits per weight
    mix_candidates.py    what a matrix may become in such a mix
    sensitivity.py       the cost of each candidate, as KL divergence
    bit_allocation.py    the least cost for a size
    methods.py           the methods, the formats that hold their results, and defaults
    writers/             the formats of Hugging Face folders
    quantization_job.py  from a model to a quantized one on disk
    resume.py            matrices that an interrupted run has kept, in work_folder.py
    size_warnings.py     warnings about the size, given before the work
    unrepresentable.py   values that no smaller type can hold, found before the work
    scheme_comparison.py the effect of a scheme on some rows, as data
    named_schemes.py     schemes by their names

It computes with PyTorch. Nothing of this is needed to load a quantized model. Importing the package
is cheap: each name below imports its module, and PyTorch, at its first use.
"""

from __future__ import annotations

from typing import Any

from octavo.base.lazy_exports import homes_of, named
from octavo.base.optional_deps import need_torch

_HOMES = homes_of(__file__)
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    try:
        return named(__name__, _HOMES, name)
    except ModuleNotFoundError:
        need_torch(f"octavo.quantize.{name}")  # says how to get it, if that is what is missing
        raise


def __dir__() -> list[str]:
    return __all__
