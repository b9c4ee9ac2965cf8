"""Quantized weights as model files have them: formats, blocks, codes and scales.

It runs without PyTorch, but where weights become tensors:

    base.py, coded.py          a weight as its file has it: blocks of GGUF's types, or codes
    formats/                   GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes, read as such codes
    ggml_types.py, levels.py   the types of GGUF, the tables of FP8, NF4 and MXFP4
    gguf_formats.py            dequantization of GGUF's types; gguf_quantize.py is the other way
    tensors.py                 weights as tensors

What makes quantized models is in ``octavo.quantize``.
"""

from __future__ import annotations

from typing import Any

from octavo.base.lazy_exports import named

_HOMES = {
    "GGMLType": "octavo.quantization.ggml_types",
    "quantize_to_blocks": "octavo.quantization.gguf_quantize:quantize",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return named(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__
