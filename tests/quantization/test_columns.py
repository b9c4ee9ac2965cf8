"""Some inputs of a matrix have the numbers that they have in the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coded_weights import coded, scattered

from octavo.base.errors import UnsupportedModelError
from octavo.quantization.base import StoredWeight
from octavo.quantization.columns import columns_of, input_unit
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_quantize import quantize_to_blocks

K = 1024
TYPES = {"F32": 1, "BF16": 1, "Q8_0": 32, "Q5_1": 32, "IQ4_NL": 32, "Q4_K": 256, "Q6_K": 256}


@pytest.mark.parametrize("name", TYPES)
def test_blocks(name):
    numbers = torch.randn(5, K, generator=torch.Generator().manual_seed(0))
    type_ = GGMLType[name]
    if type_ in (GGMLType.F32, GGMLType.BF16):
        dtype = torch.float32 if type_ is GGMLType.F32 else torch.bfloat16
        rows = numbers.to(dtype).view(torch.uint8)
    else:
        rows = quantize_to_blocks(type_, numbers)
    weight = StoredWeight(type_, rows.numpy(), (5, K))
    assert input_unit(weight) == TYPES[name]
    part = columns_of(weight, range(256, 768))
    assert part.shape == (5, 512)
    assert part.nbytes == weight.nbytes // 2
    assert np.array_equal(part.dequantize(), weight.dequantize()[:, 256:768])


@pytest.mark.parametrize(("group", "zeros"), [(32, None), (128, 8), (K, 128), (2 * K, 7)])
def test_codes(group, zeros):
    weight = coded(6, K, 8 if zeros == 128 else 4, group, zeros)
    assert input_unit(weight) == (group if group < K else 1)
    part = columns_of(weight.narrow(1, 5), range(256, 640))
    assert part.shape == (4, 384)
    assert np.array_equal(part.dequantize(), weight.dequantize()[1:5, 256:640])
    assert np.array_equal(part.select(np.array([2, 0])).dequantize(), part.dequantize()[[2, 0]])


def test_groups_that_are_spread_over_all_inputs_are_refused():
    weight = scattered(coded(6, K, 4, 128), np.arange(K) % (K // 128))
    with pytest.raises(UnsupportedModelError, match="run it on one GPU, or .* without act-order"):
        input_unit(weight)
