"""NF4 files: codes come back, and scales as bitsandbytes quantizes them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from made_weights import read, write

from octavo.base.errors import ConfigError
from octavo.quantize.grid import Scheme, quantize_to_nearest
from octavo.quantize.writers.bitsandbytes import (
    NF4Writer,
    dynamic_map,
    quantize_scales,
)

SCHEME = Scheme(4, 64, table="nf4")


def random_rows(n, k):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(2)) * 0.1


def to_nf4(rows):
    return quantize_to_nearest(rows, SCHEME).coded("nf4")


def test_the_table_of_scales():
    """Powers of ten from 1e-6 to 1, each cut into twice as many parts as the one before."""
    expected = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        for value in ((edges[:-1] + edges[1:]) / 2).tolist():
            expected += [10.0 ** (decade - 6) * value, -(10.0 ** (decade - 6)) * value]
    assert dynamic_map().dtype == np.float32 and len(expected) == 256
    np.testing.assert_allclose(dynamic_map(), np.sort(expected), rtol=1e-6)


def test_scales_are_rounded_to_the_nearest_of_the_table():
    scales = np.abs(np.random.default_rng(0).normal(size=600)).astype(np.float32)
    codes, nested, offset = quantize_scales(scales)
    assert offset == pytest.approx(scales.mean(dtype=np.float64), rel=1e-6)
    centred = scales - np.float32(offset)
    for block in range(3):
        part = centred[256 * block : 256 * (block + 1)]
        assert nested[block] == np.abs(part).max()
        distances = np.abs(dynamic_map()[None] - (part / nested[block])[:, None])
        chosen = codes[256 * block : 256 * (block + 1)]
        np.testing.assert_allclose(
            distances[np.arange(len(part)), chosen], distances.min(axis=1), atol=1e-7
        )


def test_scales_that_are_all_the_same_come_back():
    codes, nested, offset = quantize_scales(np.full(70, 0.5, np.float32))
    np.testing.assert_array_equal(dynamic_map()[codes] * nested[0] + np.float32(offset), 0.5)


@pytest.mark.parametrize("n, k", [(24, 128), (5, 64), (40, 512)])
def test_round_trip(n, k, tmp_path):
    weight = to_nf4(random_rows(n, k))
    write(tmp_path, NF4Writer(), weight, SCHEME)
    found = read(tmp_path)
    np.testing.assert_array_equal(found.codes.rows(0, n), weight.codes.rows(0, n))
    codes, nested, offset = quantize_scales(weight.scales.reshape(-1))
    of_block = np.repeat(nested, 256)[: len(codes)]
    scales = dynamic_map()[codes] * of_block + np.float32(offset)
    np.testing.assert_array_equal(found.scales.reshape(-1), scales)
    np.testing.assert_allclose(found.scales, weight.scales, rtol=0.03)


@pytest.mark.parametrize("n", [1, 3, 24])
def test_what_comes_behind_is_aligned(n):
    """A tensor of text is as long as it is, and safetensors leave no room between tensors."""
    parts = NF4Writer().parts(to_nf4(random_rows(n, 64)), SCHEME)
    begin = 0
    for part in parts.values():
        if part.dtype == "F32":
            assert begin % 4 == 0
        begin += part.data.nbytes
    assert begin % 4 == 0
    state = json.loads(parts["weight.quant_state.bitsandbytes__nf4"].data.tobytes())
    assert state["shape"] == [n, 64] and state["blocksize"] == 64


def test_what_has_no_room():
    with pytest.raises(ConfigError, match="rows of 96 are no blocks of 64"):
        NF4Writer().check((32, 96), SCHEME)
    with pytest.raises(ConfigError, match="groups of 64"):
        to_nf4(torch.zeros(2, 96))
