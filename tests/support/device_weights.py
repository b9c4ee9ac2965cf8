"""Random weights of all kinds that the GPU's kernels multiply with."""

from __future__ import annotations

from dataclasses import replace

import torch
from coded_weights import coded

from octavo.kernels.cuda.packing import pack
from octavo.kernels.cuda.weights import DenseWeight, DeviceWeight, JoinedWeight
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_quantize import quantize_to_blocks
from octavo.quantization.levels import E4M3

KINDS = {
    "float": None,
    "nibbles in 16": lambda n, k: stored(GGMLType.Q3_K, n, k),
    "nibbles in 32, mins": lambda n, k: coded(n, k, 4, 32),
    "nibbles in 128": lambda n, k: coded(n, k, 4, 128, zeros=8.0),
    "int8 in 16": lambda n, k: stored(GGMLType.Q6_K, n, k),
    "int8 in 32, mins": lambda n, k: coded(n, k, 8, 32),
    "int8 by rows": lambda n, k: coded(n, k, 8, k, zeros=128.0),
    "FP8 in 128": lambda n, k: e4m3(n, k, 128),
    "int8 for int8": lambda n, k: rounding(KINDS["int8 by rows"](n, k)),
    "FP8 by rows": lambda n, k: e4m3(n, k, k),
    "FP8 for FP8": lambda n, k: rounding(KINDS["FP8 by rows"](n, k)),
}
"""What makes them of [n, k]: k of GGUF's is a multiple of 256. Those "for" codes are of checkpoints
that were made for activations of 8 bits."""


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, dtype)


def stored(type, n, k, seed=0):
    """Of a type of GGUF's."""
    return StoredWeight(type, quantize_to_blocks(type, random(n, k, seed=seed)).numpy(), (n, k))


def rounding(weight):
    return replace(weight, rounds_activations=True)


def e4m3(n, k, group):
    """FP8 without NaN."""
    weight = coded(n, k, 8, group, zeros=0.0, levels=E4M3)
    codes = weight.codes.values
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return weight


def device_weight(kind, n, k, dtype=torch.float32, device="cpu") -> DeviceWeight:
    """One of ``KINDS``; or "joined", of two of them."""
    if kind == "joined":
        names, half = ("nibbles in 32, mins", "int8 in 32, mins"), n // 2
        return JoinedWeight([device_weight(name, half, k, dtype, device) for name in names])
    if KINDS[kind] is None:
        return DenseWeight(random(n, k, seed=1).to(device, dtype))
    return pack([KINDS[kind](n, k)], device, dtype)
