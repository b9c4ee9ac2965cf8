"""What a matrix may become: as large as what is written, with the values that come back."""

from __future__ import annotations

import pytest
import torch

from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_quantize import quantize_to_blocks
from octavo.quantize.grid import quantize_to_nearest
from octavo.quantize.mix_candidates import (
    GGUFTypeCandidate,
    SchemeCandidate,
    gguf_candidates,
)
from octavo.quantize.scheme import Scheme
from octavo.quantize.writers.compressed_tensors import CompressedTensorsWriter

WEIGHT = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
IMPORTANCE = torch.rand(256, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("columns, smallest", [(256, "Q2_K"), (96, "IQ4_NL"), (40, "F16")])
def test_types_that_fit_rows(columns, smallest):
    found = gguf_candidates(columns)
    assert found[0].name == smallest and found[-1].name == "F16"
    sizes = [each.num_bits((8, columns)) for each in found]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("candidate", gguf_candidates(256) + gguf_candidates(96)[:-2], ids=str)
def test_a_type_has_the_size_and_the_values_of_its_bytes(candidate):
    blocks = quantize_to_blocks(candidate.type, WEIGHT, IMPORTANCE)
    assert candidate.num_bits((8, 256)) == blocks.numel() * 8
    values = candidate.values(WEIGHT, IMPORTANCE)
    assert torch.equal(values, candidate.values(WEIGHT, IMPORTANCE))
    assert 0 < float((values - WEIGHT).square().mean()) < 0.3
    again = GGUFTypeCandidate(GGMLType.F16).values(values.half().float(), None)
    torch.testing.assert_close(again, values, atol=1e-3, rtol=1e-3)


def test_a_scheme_has_the_values_of_rounding_to_nearest():
    scheme = Scheme(4, 32)
    candidate = SchemeCandidate(scheme, CompressedTensorsWriter())
    expected = quantize_to_nearest(WEIGHT, scheme, search=True, importance=IMPORTANCE)
    assert torch.equal(candidate.values(WEIGHT, IMPORTANCE), expected.dequantize())
    assert candidate.name == "4 bits"


def test_no_scheme_is_floats_of_16_bits():
    candidate = SchemeCandidate(None, CompressedTensorsWriter())
    assert (candidate.name, candidate.num_bits((8, 256))) == ("16 bits", 8 * 256 * 16)
    torch.testing.assert_close(candidate.values(WEIGHT, None), WEIGHT, atol=0, rtol=2**-8)
