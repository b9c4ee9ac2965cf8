"""Codes with scales: what they stand for, in numpy and as tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.quantization.coded import CodedWeight, PlainCodes
from octavo.quantization.tensors import to_torch


def coded(n=6, k=40, bits=4, group_size=8, *, zeros="each", levels=None, groups=None, seed=0):
    """A random weight. ``zeros``: "each" group has its own, or the number that all have."""
    rng = np.random.default_rng(seed)
    num_groups = -(-k // group_size)
    scales = rng.uniform(0.01, 0.02, (n, num_groups)).astype(np.float16).astype(np.float32)
    if zeros == "each":
        zeros = rng.integers(0, 1 << bits, scales.shape).astype(np.float32)
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    return CodedWeight(
        "made up", (n, k), bits, group_size, PlainCodes(codes), scales, zeros, n * k, levels, groups
    )


def expected(weight):
    """One value after the other."""
    n, k = weight.shape
    codes = weight.codes.rows(0, n)
    zeros = np.broadcast_to(np.asarray(weight.zeros, np.float32), (n, weight.num_groups))
    scales = np.broadcast_to(weight.scales, (n, weight.num_groups))
    out = np.empty((n, k), np.float32)
    for r in range(n):
        for c in range(k):
            g = c // weight.group_size if weight.groups is None else weight.groups[c]
            q = codes[r, c] if weight.levels is None else weight.levels[codes[r, c]]
            out[r, c] = scales[r, g] * (np.float32(q) - zeros[r, g])
    return out


SCATTERED = np.random.default_rng(1).permutation(np.arange(40, dtype=np.int32) // 8)
CASES = {
    "zeros": coded(),
    "a zero": coded(zeros=8.0),
    "a row": coded(group_size=64),
    "levels": coded(zeros=0.0, levels=np.linspace(-1, 1, 16, dtype=np.float32)),
    "scattered groups": coded(groups=SCATTERED),
    "a last group of less": coded(k=37, bits=3),
    "all rows share": CodedWeight(
        *("fp", (6, 40), 4, 40, coded().codes, np.full((1, 1), 0.5, np.float32), 2.0, 10),
    ),
}


@pytest.mark.parametrize("weight", CASES.values(), ids=CASES)
def test_dequantize(weight):
    assert np.array_equal(weight.dequantize(), expected(weight))
    assert np.array_equal(weight.dequantize(2, 5), expected(weight)[2:5])
    part = weight.narrow(1, 5)
    assert part.shape == (4, weight.shape[1])
    assert np.array_equal(part.dequantize(1, 3), expected(weight)[2:4])


@pytest.mark.parametrize("weight", CASES.values(), ids=CASES)
def test_as_a_tensor(weight):
    tensor = to_torch(weight)
    assert tensor.shape == weight.shape and tensor.nbytes == weight.nbytes
    assert np.array_equal(tensor.dequantize().numpy(), expected(weight))
    out = torch.empty(3, weight.shape[1])
    assert tensor.dequantize(2, 5, out) is out
    assert np.array_equal(out.numpy(), expected(weight)[2:5])
    rows = torch.tensor([4, 0, 4])
    assert np.array_equal(tensor.select(rows).numpy(), expected(weight)[rows])
    assert tensor.select(torch.tensor([], dtype=torch.int64)).shape == (0, weight.shape[1])


@pytest.mark.parametrize("step", [1, 2, 3])
def test_rows_that_are_stepped_over_are_not_unpacked(step):
    weight = coded(14, 32, 4, 16)
    part = weight.narrow(3, 13, step)
    expected = weight.dequantize()[3:13:step]
    assert part.shape == expected.shape
    np.testing.assert_array_equal(part.dequantize(), expected)
    np.testing.assert_array_equal(part.narrow(1, 3).dequantize(), expected[1:3])
    assert part.codes.rows(0, 0).shape == (0, 32)
