"""FP8 checkpoints: weights in float8, with scales to multiply them by.

::

    weight            F8_E4M3 [N, K], or rarely F8_E5M2
    weight_scale      one number, or one for each row
    weight_scale_inv  the same, or one for each block of ``weight_block_size``; a factor as well

DeepSeek-V3's checkpoints have blocks; those of Transformers and of FBGEMM are alike otherwise. All
are made for activations in FP8. ``activation_scheme`` says where their scales come from: "dynamic"
from each row, "static" from calibration, as ``input_scale``, which is not read: octavo rounds
activations with a scale for each row, which clips nothing. Sources: Transformers 5
``integrations/finegrained_fp8.py``, vLLM 0.32 ``quantization/fp8.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from octavo.base.fields import Fields
from octavo.quantization.coded import CodedWeight
from octavo.quantization.formats.codes import ByteCodes
from octavo.quantization.formats.grid import of_blocks
from octavo.quantization.formats.stored import FLOAT8, FLOATS, Parts, StoredTensor

_SCALES = ("weight_scale", "weight_scale_inv")
_ACTIVATION_SCHEMES = ("dynamic", "static")


class FP8:
    """Reader of FP8 weights, see the module and ``WeightFormat``."""

    name = "fp8"

    def __init__(self, fields: Fields):
        self._block: tuple[int, int] | None = None
        if "weight_block_size" in fields:
            rows, columns = fields.each("weight_block_size", Fields.integer, 2)
            self._block = rows, columns
        # FBGEMM's configs do not have it: it is always dynamic.
        scheme = fields.text("activation_scheme", "dynamic")
        self._rounds_activations = scheme in _ACTIVATION_SCHEMES

    def part(self, tensor_name: str) -> tuple[str, str] | None:
        module, _, part = tensor_name.rpartition(".")
        return (f"{module}.weight", part) if part in ("weight", *_SCALES) else None

    def assemble(self, name: str, parts: Mapping[str, StoredTensor]) -> CodedWeight:
        tensors = Parts(name, parts)
        weight = tensors.need("weight", *FLOAT8, dims=2)
        scale = tensors.need(next(filter(tensors.find, _SCALES), _SCALES[0]), *FLOATS, "F8_E8M0")
        num_outputs, num_inputs = weight.shape
        if self._block is not None:
            block = self._block
        else:
            block = num_outputs if prod(scale.shape) == 1 else 1, num_inputs
        return float8(self.name, tensors, weight, scale, block, self._rounds_activations)


def float8(
    format: str,
    parts: Parts,
    weight: StoredTensor,
    scale: StoredTensor,
    block: tuple[int, int],
    rounds_activations: bool,
) -> CodedWeight:
    """Read a float8 weight [N, K] with a scale for each block."""
    num_outputs, num_inputs = weight.shape
    return CodedWeight(
        format=format,
        shape=(num_outputs, num_inputs),
        bits=8,
        group_size=block[1],
        codes=ByteCodes(weight.bytes.reshape(weight.shape)),
        scales=of_blocks(scale, (num_outputs, num_inputs), block),
        zeros=0.0,
        levels=FLOAT8[weight.dtype],
        nbytes=parts.nbytes,
        rounds_activations=rounds_activations,
    )
