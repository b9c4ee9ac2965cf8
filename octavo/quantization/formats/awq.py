"""AWQ as AutoAWQ writes it for its GEMM kernel: 4-bit codes in words along the outputs.

::

    qweight  int32 [K, N / 8]        eight outputs a word, in the order 0, 2, 4, 6, 1, 3, 5, 7
    qzeros   int32 [groups, N / 8]   in the same order
    scales   float [groups, N]

    value = scales[k // group_size, n] * (q[k, n] - zero[k // group_size, n])

Paper: arXiv 2306.00978. Layout: AutoAWQ 0.2 ``modules/linear/gemm.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.quantization.coded import CodedWeight
from octavo.quantization.formats.codes import AWQCodes, unpack_awq
from octavo.quantization.formats.grid import ceil_div, one_or_all
from octavo.quantization.formats.stored import FLOATS, Parts, StoredTensor

_PARTS = ("qweight", "qzeros", "scales")


class AWQ:
    """Reader of AWQ weights, see the module and ``WeightFormat``."""

    name = "awq"

    def __init__(self, fields: Fields):
        bits = fields.integer("bits", None) or fields.integer("w_bit")
        layout = fields.text("version", "gemm").lower()
        if bits != 4 or layout != "gemm":
            raise UnsupportedModelError(
                f"{fields.path}: AWQ of {bits} bits in the layout {layout!r:.80} is not supported, "
                "but 4 bits in the layout gemm are"
            )
        name = "group_size" if "group_size" in fields else "q_group_size"
        self._group_size: int = fields.integer(name, minimum=-1)
        if self._group_size == 0:
            raise fields.error(name, "0 is neither a size nor -1")

    def part(self, tensor_name: str) -> tuple[str, str] | None:
        module, _, part = tensor_name.rpartition(".")
        return (f"{module}.weight", part) if part in _PARTS else None

    def assemble(self, name: str, parts: Mapping[str, StoredTensor]) -> CodedWeight:
        tensors = Parts(name, parts)
        qweight = tensors.need("qweight", "I32", dims=2)
        num_inputs, num_outputs = qweight.shape[0], 8 * qweight.shape[1]
        group_size = num_inputs if self._group_size < 0 else self._group_size
        num_groups = ceil_div(num_inputs, max(group_size, 1))
        scales = tensors.need("scales", *FLOATS).shaped(num_groups, num_outputs)
        qzeros = tensors.need("qzeros", "I32").shaped(num_groups, num_outputs // 8)
        zeros = unpack_awq(qzeros.words())
        return CodedWeight(
            format=self.name,
            shape=(num_outputs, num_inputs),
            bits=4,
            group_size=group_size,
            codes=AWQCodes(qweight.words()),
            scales=np.ascontiguousarray(scales.floats().T),
            zeros=one_or_all(zeros.astype(np.float32)),
            nbytes=tensors.nbytes,
        )
