"""Random weights as quantized checkpoints have them, packed value by value after descriptions of
the formats, and so in another way than they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.quantization.formats.stored import StoredTensor


class Packed(NamedTuple):
    """A weight as its parts, and its values: float32 [N, K]."""

    tensors: dict[str, torch.Tensor]
    values: np.ndarray


# Integers in words --------------------------------------------------------------------------------


def stream(codes: Any, bits: int) -> list[int]:
    """Words of 32 bits without gaps, the first code in the lowest bits of the first."""
    codes = [int(code) for code in codes]
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return [number >> (32 * i) & 0xFFFFFFFF for i in range(-(-len(codes) * bits // 32))]


def with_gaps(codes: Any, bits: int) -> list[int]:
    """Words with as many whole codes as fit."""
    each, codes = 32 // bits, list(codes)
    return [stream(codes[i : i + each], bits)[0] for i in range(0, len(codes), each)]


def words(rows: Any, bits: int, pack: Callable[[Any, int], list[int]] = stream) -> np.ndarray:
    """Every row in words of its own: uint32 [R, W]."""
    return np.array([pack(row, bits) for row in rows], dtype=np.uint32)


def int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int32))


def numbers(rng: np.random.Generator, n: int, groups: int) -> torch.Tensor:
    """Scales of both signs: float16 [n, groups]."""
    return torch.from_numpy(rng.normal(size=(n, groups)).astype(np.float16))


# Formats ------------------------------------------------------------------------------------------


def gptq(
    rng: np.random.Generator, n: int, k: int, bits: int = 4, group: int = 16, *,
    version: int = 1, order: np.ndarray | None = None, symmetric: bool = False,
) -> Packed:  # fmt: skip
    """As AutoGPTQ: zeros of v1 are less one before they are packed. ``order`` is g_idx."""
    groups = -(-k // group)
    codes = rng.integers(0, 2**bits, (n, k))
    zeros = rng.integers(version == 1, 2**bits, (n, groups))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = numbers(rng, n, groups)
    of_input = np.arange(k) // group if order is None else order
    tensors = {
        "qweight": int32(words(codes, bits).T),
        "qzeros": int32(words(zeros.T - (version == 1), bits)),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(of_input.astype(np.int32)),
    }
    return Packed(tensors, (codes - zeros[:, of_input]) * scales.float().numpy()[:, of_input])


def awq(rng: np.random.Generator, n: int, k: int, group: int = 16) -> Packed:
    groups = k // group
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (groups, n))
    scales = numbers(rng, groups, n)

    def pack(rows: np.ndarray) -> torch.Tensor:
        order = [8 * word + column for word in range(n // 8) for column in (0, 2, 4, 6, 1, 3, 5, 7)]
        return int32(words(rows[:, order], 4))

    of_input = np.arange(k) // group
    values = (codes - zeros[of_input]) * scales.float().numpy()[of_input]
    return Packed({"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}, values.T)


def pack_quantized(
    rng: np.random.Generator, n: int, k: int, bits: int = 4, group: int = 16, *,
    pack: Callable[[Any, int], list[int]] = stream, symmetric: bool = False,
    order: np.ndarray | None = None,
) -> Packed:  # fmt: skip
    """Of compressed-tensors: signed integers, and zeros, stored with 2 ** (bits - 1) added."""
    groups, middle = -(-k // group), 2 ** (bits - 1)
    codes = rng.integers(-middle, middle, (n, k))
    zeros = rng.integers(-middle, middle, (n, groups)) * (not symmetric)
    scales = numbers(rng, n, groups)
    of_input = np.arange(k) // group if order is None else order
    tensors = {
        "weight_packed": int32(words(codes + middle, bits, pack)),
        "weight_shape": torch.tensor([n, k]),
        "weight_scale": scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = int32(words((zeros + middle).T, bits, pack).T)
    if order is not None:
        tensors["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
    return Packed(tensors, (codes - zeros[:, of_input]) * scales.float().numpy()[:, of_input])


def int_quantized(rng: np.random.Generator, n: int, k: int) -> Packed:
    codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    scales = numbers(rng, n, 1)
    tensors = {"weight": torch.from_numpy(codes), "weight_scale": scales}
    return Packed(tensors, codes * scales.float().numpy())


def float8(
    rng: np.random.Generator, n: int, k: int, block: tuple[int, int], scale_name: str
) -> Packed:
    """A scale for each block. The values are those of PyTorch's conversion."""
    weight = torch.from_numpy(rng.normal(size=(n, k)) * 100).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(rng.random((-(-n // block[0]), -(-k // block[1])))).float()
    rows, columns = np.arange(n) // block[0], np.arange(k) // block[1]
    values = weight.float().numpy() * scales.numpy()[rows][:, columns]
    return Packed({"weight": weight, scale_name: scales}, values)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def float4(rng: np.random.Generator, n: int, k: int, kind: str) -> Packed:
    """MXFP4 or NVFP4."""
    group = 32 if kind == "mxfp4" else 16
    codes = rng.integers(0, 16, (n, k))
    tensors = {"weight_packed": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).byte()}
    if kind == "mxfp4":
        exponents = rng.integers(100, 140, (n, k // group))
        tensors["weight_scale"] = torch.from_numpy(exponents).byte()
        scales = 2.0 ** (exponents - 127)
    else:
        local = torch.from_numpy(rng.random((n, k // group)) * 400).to(torch.float8_e4m3fn)
        tensors |= {"weight_scale": local, "weight_global_scale": torch.tensor([37.5])}
        scales = local.float().numpy() / np.float32(37.5)
    return Packed(tensors, FP4[codes] * np.repeat(scales, group, axis=1).astype(np.float32))


def four_bits(
    rng: np.random.Generator, n: int, k: int, *, kind: str = "nf4", nested: bool = False,
    block: int = 64,
) -> Packed:  # fmt: skip
    """Of bitsandbytes, with any table of 16 values."""
    codes = rng.integers(0, 16, n * k)
    padded = np.pad(codes, (0, len(codes) % 2))
    num_blocks = -(-len(codes) // block)
    table = rng.normal(size=16).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
    state["shape"] = [n, k]
    tensors = {"weight": (padded[::2] << 4 | padded[1::2]).astype(np.uint8)[:, None]}
    tensors["weight.quant_map"] = table
    if nested:
        inner, outer = rng.integers(0, 256, num_blocks), rng.random(-(-num_blocks // 256))
        inner_table = rng.normal(size=256).astype(np.float32)
        outer = outer.astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors["weight.absmax"] = inner.astype(np.uint8)
        tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": inner_table}
        absmax = inner_table[inner] * np.repeat(outer, 256)[:num_blocks] + np.float32(0.25)
    else:
        tensors["weight.absmax"] = absmax = rng.random(num_blocks).astype(np.float32)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
    values = table[codes] * np.repeat(absmax, block)[: len(codes)]
    return Packed({key: torch.from_numpy(t) for key, t in tensors.items()}, values.reshape(n, k))


def int8(rng: np.random.Generator, n: int, k: int) -> Packed:
    codes = rng.integers(-127, 128, (n, k)).astype(np.int8)
    largest = rng.random(n).astype(np.float32)
    tensors = {"weight": torch.from_numpy(codes), "SCB": torch.from_numpy(largest)}
    tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return Packed(tensors, codes * (largest[:, None] / np.float32(127)))


# As a format is given them ------------------------------------------------------------------------

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def stored(tensor: torch.Tensor, name: str) -> StoredTensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return StoredTensor(
        DTYPES[tensor.dtype], tuple(tensor.shape), data, Path("m.safetensors"), name
    )


def parts_of(format: Any, tensors: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """The tensors of a module ``m`` as parts of ``m.weight``."""
    found = {}
    for name, tensor in tensors.items():
        weight, part = format.part(f"m.{name}")
        assert weight == "m.weight"
        found[part] = stored(tensor, f"m.{name}")
    return found
