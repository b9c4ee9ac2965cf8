"""Quantization methods that octavo reads, by the names that configs have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.quantization.formats.awq import AWQ
from octavo.quantization.formats.bitsandbytes import BitsAndBytes
from octavo.quantization.formats.compressed_tensors import CompressedTensors
from octavo.quantization.formats.fp8 import FP8
from octavo.quantization.formats.gptq import GPTQ
from octavo.quantization.formats.mxfp4 import MXFP4
from octavo.quantization.formats.stored import WeightFormat

_FORMATS: dict[str, Callable[[Fields], WeightFormat]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": MXFP4,
}


def open_format(config: Mapping[str, Any], path: Path) -> WeightFormat:
    """Create the reader that a ``quantization_config`` asks for.

    Args:
        config: with ``quant_method``, and the method's own settings.
        path: of the file that has it, for errors.

    Raises:
        UnsupportedModelError: octavo does not read weights of this method.
        ModelFileError: a setting is missing, or makes no sense.
    """
    fields = Fields(path, config)
    method = _method(fields)
    if method not in _FORMATS:
        raise UnsupportedModelError(
            f"{path}: the weights are quantized with {method:.80}; octavo reads those of "
            f"{', '.join(_FORMATS)}, unquantized safetensors and GGUF files"
        )
    return _FORMATS[method](fields)


def _method(fields: Fields) -> str:
    method = fields.text("quant_method", None) or fields.text("method", None)
    if method is not None:
        return method.lower()
    # Old configs without a name are bitsandbytes'.
    if fields.raw("load_in_4bit") or fields.raw("load_in_8bit"):
        return "bitsandbytes"
    return "an unnamed method"
