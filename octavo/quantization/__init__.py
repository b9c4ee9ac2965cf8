"""Weights of a few bits: as files have them, and made.

    from octavo.quantization import Scheme, quantize_to_nearest

What reads is in this package, and runs without PyTorch but where weights become tensors:

    base.py, coded.py          a weight as its file has it: blocks of GGUF's types, or codes
    formats/                   GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes, read as such codes
    ggml_types.py, levels.py   the types of GGUF, the tables of FP8, NF4 and MXFP4
    gguf_formats.py            dequantization of GGUF's types; gguf_quantize.py is the other way
    tensors.py                 weights as tensors

What makes quantized models is in ``produce/``: grids, GPTQ, AWQ, AutoRound, rotations, models. The
names below are what a script needs most. To import this package is cheap: each of them brings in
its module, and PyTorch, when it is first used.
"""

from __future__ import annotations

from typing import Any

from octavo.base.lazy_exports import named
from octavo.base.optional_deps import need_torch

_HOMES = {
    "GGMLType": "octavo.quantization.ggml_types",
    "QuantizedMatrix": "octavo.quantization.produce.grid",
    "RotatedCheckpoint": "octavo.quantization.produce.rotation",
    "Scheme": "octavo.quantization.produce.scheme",
    "bits_against_error": "octavo.quantization.produce.explore",
    "calibration_windows": "octavo.quantization.produce.calibration",
    "explore": "octavo.quantization.produce.explore",
    "input_statistics": "octavo.quantization.produce.observers",
    "quantize_gptq": "octavo.quantization.produce.gptq:gptq",
    "quantize_model": "octavo.quantization.produce.pipeline",
    "quantize_to_blocks": "octavo.quantization.gguf_quantize:quantize",
    "quantize_to_nearest": "octavo.quantization.produce.grid",
    "rows_of": "octavo.quantization.produce.explore",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    try:
        return named(__name__, _HOMES, name)
    except ModuleNotFoundError:
        need_torch(f"octavo.quantization.{name}")  # says how to get it, if that is what is missing
        raise


def __dir__() -> list[str]:
    return __all__
