"""Weights in the order of the kernels: what goes in comes out."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from weights import stored

from octavo.base.errors import EngineError, UnsupportedModelError
from octavo.kernels.cpu import abi, layout, packing
from octavo.kernels.cpu.library import load
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType, block_shape, row_bytes
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.tensors import BlockTensor

INTEGER_FORMATS = [
    (format, group)
    for format, traits in layout.INTEGER_FORMATS.items()
    for group in traits.groups
    if not traits.nested_group
]
SHAPES = [(1, 1), (7, 31), (16, 32), (17, 33), (100, 96), (33, 576), (5, 1000)]

INTEGERS = (
    *(GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.IQ4_NL),
    *(GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.IQ4_XS),
)
TYPES = (*INTEGERS, GGMLType.F32, GGMLType.F16, GGMLType.BF16)
NONLINEAR = {
    abi.OCT_W4N: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    abi.OCT_W4F: (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}


def random_bytes(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def unpacked(native, weight):
    return torch.from_numpy(weight.unpack(native.library, native.pool))


def integers(native, format, group, n, k, seed=0):
    """A packed matrix of random integers and scales, and what it stands for, in float64."""
    rng = np.random.default_rng(seed)
    spec = packing.plain_format(format, n, k, group, native.library)
    traits = layout.INTEGER_FORMATS[format]
    q = rng.integers(0, 1 << traits.bits, (n, k), dtype=np.uint8)
    groups = -(-k // group)
    d = rng.normal(size=(n, groups)).astype(np.float16)
    m = rng.normal(size=(n, groups)).astype(np.float16) if traits.has_min else None
    weight = packing.pack_integers(spec, q, d, m, native.library, native.pool)
    levels = np.arange(1 << traits.bits) - (0 if traits.has_min else 1 << traits.bits - 1)
    levels = np.array(NONLINEAR.get(format, levels))
    of = np.arange(k) // group
    values = d.astype(np.float64)[:, of] * levels[q]
    return weight, values if m is None else values + m.astype(np.float64)[:, of]


@pytest.mark.parametrize(("format", "group"), INTEGER_FORMATS)
def test_integers_and_scales_are_kept(native, format, group):
    for n, k in SHAPES:
        weight, values = integers(native, format, group, n, k)
        got = weight.unpack(native.library, native.pool)
        np.testing.assert_array_equal(got, values.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_kept(native, dtype):
    for n, k in SHAPES:
        values = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype)
        values[0, 0], values[-1, -1] = float("inf"), 6e-8
        weight = packing.pack(stored(values), native.library, native.pool)
        assert weight.shape == (n, k)
        assert torch.equal(unpacked(native, weight), values.float())


def test_a_tensor_that_is_not_contiguous(native):
    values = torch.randn(40, 20)
    every_other = StoredWeight(GGMLType.F32, stored(values).data[::2], (20, 20))
    weight = packing.pack(every_other, native.library, native.pool)
    assert torch.equal(unpacked(native, weight), values[::2])


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_gguf_types_are_kept_exactly(native, type):
    unit = block_shape(type)[0]
    for n, k in [(1, 1), (17, 3), (50, 18 if unit == 32 else 2)]:
        # Any bytes: scales are infinite, NaN, denormal and huge too.
        k *= max(unit, 32)
        data = random_bytes(n, row_bytes(type, k), seed=n)
        source = stored(BlockTensor(type, data, (n, k)))
        weight = packing.pack(source, native.library, native.pool)
        got = weight.unpack(native.library, native.pool)
        np.testing.assert_array_equal(got, dequantize(type, data).numpy())


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_stored_rows_stand_for_the_same(native_on_any_level, type):
    native = native_on_any_level
    for n, k in [(1, 256), (50, 768)]:
        # At any address, and any bytes: scales are infinite, NaN, denormal and huge too.
        data = np.frombuffer(
            b"x" + random_bytes(n, row_bytes(type, k)).numpy().tobytes(), "u1", -1, 1
        )
        source = StoredWeight(type, data.reshape(n, -1), (n, k))
        packed = packing.pack(source, native.library, native.pool)
        spec, _ = packing.in_place(source, native.library)
        assert spec.num_bytes == source.nbytes
        rows = packing.PackedWeight(spec, source.data).unpack(native.library, native.pool)
        expected = packed.unpack(native.library, native.pool)
        np.testing.assert_array_equal(rows.view("u4"), expected.view("u4"))


@pytest.mark.parametrize("type", INTEGERS, ids=lambda type: type.name)
def test_bytes_are_nearly_those_of_the_file(native, type):
    weight = BlockTensor(type, random_bytes(64, row_bytes(type, 4096)), (64, 4096))
    packed = packing.packed_format(stored(weight), native.library).num_bytes
    assert 1 <= packed / weight.data.numel() <= (1.055 if type == GGMLType.Q3_K else 1.03)


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_packed_bytes_are_the_same_everywhere(native_on_any_level, type):
    """A packed model may be kept on disk, whatever processor reads it next."""
    native = native_on_any_level
    source = BlockTensor(type, random_bytes(18, row_bytes(type, 512)), (18, 512))
    here = packing.pack(stored(source), native.library, native.pool)
    scalar = packing.pack(stored(source), load("scalar"), native.pool)
    np.testing.assert_array_equal(here.data, scalar.data)


def test_nothing_is_written_behind_the_end(native):
    for format, group in INTEGER_FORMATS:
        spec = packing.plain_format(format, 19, 333, group, native.library)
        memory = packing.aligned(spec.num_bytes + 64)
        memory[:] = 0xA5
        q = np.zeros((19, 333), dtype=np.uint8)
        d = np.zeros((19, -(-333 // group)), dtype=np.float16)
        m = d.ctypes.data if layout.INTEGER_FORMATS[format].has_min else None
        struct = spec.as_struct(memory.ctypes.data)
        native.check(
            native.lib.oct_pack(
                native.pool, ctypes.byref(struct), q.ctypes.data, d.ctypes.data, m, struct.data
            )
        )
        assert (memory[spec.num_bytes :] == 0xA5).all() and (memory[: spec.num_bytes] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((24, 4, 4, 0), "unknown format 24"),
        ((abi.OCT_W4S, 0, 4, 32), r"\[0, 4\]"),
        ((abi.OCT_F32, 4, -1, 0), r"\[4, -1\]"),
        ((abi.OCT_W4S, 4, 32, 16), "groups of 16"),
        ((abi.OCT_W8S, 4, 32, 0), "groups of 0"),
        ((abi.OCT_W8A, 4, 32, 16), "groups of 16"),
        ((abi.OCT_W5S, 4, 64, 64), "groups of 64"),
        ((abi.OCT_W3S, 4, 64, 16), "groups of 16"),
        ((abi.OCT_W4F, 4, 64, 64), "groups of 64"),
        ((abi.OCT_FP4, 4, 64, 32), "groups of 32"),
        ((abi.OCT_K4A, 4, 256, 16), "groups of 16"),
        ((abi.OCT_K6S, 4, 256, 32), "groups of 32"),
        ((abi.OCT_BF16, 4, 32, 32), "groups of 32"),
        ((abi.OCT_STORED + GGMLType.Q4_K, 4, 128, 0), "multiple of 256 values, not 128"),
        ((abi.OCT_STORED + GGMLType.TQ1_0, 4, 256, 0), "GGUF type 34"),
        ((abi.OCT_STORED + GGMLType.BF16, 4, 256, 32), "unknown format 94"),
        ((abi.OCT_F32, 2**31 - 1, 2**31 - 1, 0), "2147483647"),
    ],
)
def test_formats_that_do_not_exist(native, arguments, message):
    assert native.lib.oct_packed_bytes(*arguments) == abi.OCT_ERR_ARGUMENT
    with pytest.raises(EngineError, match=message):
        native.check(abi.OCT_ERR_ARGUMENT)


def test_what_cannot_be_packed(native):
    for type in (GGMLType.TQ1_0, GGMLType.I32):
        source = BlockTensor(type, random_bytes(2, row_bytes(type, 256)), (2, 256))
        with pytest.raises(UnsupportedModelError, match=type.name):
            packing.pack(stored(source), native.library, native.pool)

    spec = packing.plain_format(abi.OCT_W8S, 2, 32, 32, native.library)
    out = packing.aligned(spec.num_bytes)
    struct = ctypes.byref(spec.as_struct(out.ctypes.data))
    source = out.ctypes.data
    lib, pool = native.lib, native.pool
    for call, message in [
        (lambda: lib.oct_pack_gguf(pool, struct, GGMLType.Q4_0, source, source), "Q4_0 becomes"),
        (lambda: lib.oct_pack(pool, struct, source, None, None, source), "without mins"),
        (lambda: lib.oct_pack(pool, struct, source, source, source, source), "without mins"),
        (
            lambda: lib.oct_pack(pool, struct, None, source, None, source),
            "pack from or into is NULL",
        ),
        (lambda: lib.oct_unpack(pool, struct, None), "unpack from or into is NULL"),
    ]:
        with pytest.raises(EngineError, match=message):
            native.check(call())
    spec = packing.plain_format(abi.OCT_K4A, 2, 256, 32, native.library)
    nested = ctypes.byref(spec.as_struct(out.ctypes.data))
    with pytest.raises(EngineError, match="of a GGUF file only"):
        native.check(lib.oct_pack(pool, nested, source, source, source, source))
    spec = packing.plain_format(abi.OCT_W4S, 2, 33, 32, native.library)
    struct = ctypes.byref(spec.as_struct(out.ctypes.data))
    code = native.lib.oct_pack_gguf(native.pool, struct, GGMLType.Q4_0, source, source)
    with pytest.raises(EngineError, match="multiple of 32 values, not 33"):
        native.check(code)
