"""Random weights of codes with scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.quantization.coded import CodedWeight, PlainCodes


def coded(n, k, bits, group_size, zeros=None, levels=None, seed=0):
    """[n, k], of float16 scales; without ``zeros``, each group has one of its own."""
    rng = np.random.default_rng(seed)
    groups = -(-k // group_size)
    scales = rng.uniform(0.01, 0.02, (n, groups)).astype(np.float16).astype(np.float32)
    if zeros is None:
        zeros = rng.integers(0, 1 << bits, scales.shape).astype(np.float32)
    codes = PlainCodes(rng.integers(0, 1 << bits, (n, k), dtype=np.uint8))
    return CodedWeight("x", (n, k), bits, group_size, codes, scales, zeros, n * k, levels)


def scattered(weight, groups):
    """The same with inputs in other groups: [k]."""
    return replace(weight, groups=groups.astype(np.int32))
