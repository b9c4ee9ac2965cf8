"""Quantized weights as model files store them: formats, blocks, codes and scales.

Only the modules that make tensors need PyTorch:

    base.py, coded.py          a weight as its file stores it: blocks of GGUF types, or codes
    formats/                   GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes, read as codes
    ggml_types.py, levels.py   the types of GGUF, the tables of FP8, NF4 and MXFP4
    gguf_formats.py            dequantization of GGUF types; gguf_quantize.py is the inverse
    tensors.py                 weights as tensors

``octavo.quantize`` makes quantized models.
"""

from __future__ import annotations

from typing import Any

from octavo.base.lazy_exports import homes_of, named

_HOMES = homes_of(__file__)
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return named(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__
