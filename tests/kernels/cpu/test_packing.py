"""Weights in the order of the kernels: what goes in comes out, exactly or as near as promised."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from weights import stored

from octavo.errors import EngineError, UnsupportedModelError
from octavo.kernels.cpu import abi, packing
from octavo.kernels.cpu.library import load
from octavo.quantization.base import Weight
from octavo.quantization.ggml_types import GGMLType, row_bytes
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.tensors import QuantizedTensor

INTEGER_FORMATS = [
    (format, group)
    for format in (abi.OCT_W4S, abi.OCT_W4A, abi.OCT_W8S, abi.OCT_W8A)
    for group in (16, 32, 64, 128)
    if group > 16 or format in (abi.OCT_W8S, abi.OCT_W8A)
]
SHAPES = [(1, 1), (7, 31), (16, 32), (17, 33), (100, 96), (33, 576), (5, 1000)]

EXACT = [
    *(GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.IQ4_NL),
    *(GGMLType.F32, GGMLType.F16, GGMLType.BF16),
]
# Type: where the float16 scales of a block are.
ROUNDED = {
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_XS: (0,),
}


def random_bytes(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def unpacked(native, weight):
    return torch.from_numpy(weight.unpack(native.library, native.pool))


def with_scales(type, rows, columns, largest, seed=0):
    """Random blocks whose float16 scales are at most ``largest``, of both signs."""
    data = random_bytes(rows, row_bytes(type, columns), seed=seed)
    blocks = data.view(-1, row_bytes(type, 256))
    generator = torch.Generator().manual_seed(seed)
    for at in ROUNDED[type]:
        scale = (torch.rand(len(blocks), generator=generator) * 2 - 1) * largest
        blocks[:, at : at + 2] = scale.half().view(torch.uint8).view(-1, 2)
    return QuantizedTensor(type, data, (rows, columns))


def integers(native, format, group, n, k, seed=0):
    """A packed matrix of random integers and scales, and what it stands for, in float64."""
    rng = np.random.default_rng(seed)
    spec = packing.plain_format(format, n, k, group, native.library)
    nibbles, has_min = format in (abi.OCT_W4S, abi.OCT_W4A), format in (abi.OCT_W4A, abi.OCT_W8A)
    q = rng.integers(0, 16 if nibbles else 256, (n, k), dtype=np.uint8)
    groups = -(-k // group)
    d = rng.normal(size=(n, groups)).astype(np.float16)
    m = rng.normal(size=(n, groups)).astype(np.float16) if has_min else None
    weight = packing.pack_integers(spec, q, d, m, native.library, native.pool)
    zero = {abi.OCT_W4S: 8, abi.OCT_W8S: 128}.get(format, 0)
    of = np.arange(k) // group
    values = d.astype(np.float64)[:, of] * (q.astype(np.float64) - zero)
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
    every_other = Weight(GGMLType.F32, stored(values).data[::2], (20, 20))
    weight = packing.pack(every_other, native.library, native.pool)
    assert torch.equal(unpacked(native, weight), values[::2])


@pytest.mark.parametrize("type", EXACT, ids=lambda type: type.name)
def test_gguf_types_that_are_kept_exactly(native, type):
    for n, k in [(1, 32), (17, 96), (50, 576)]:
        # Any bytes: scales are infinite, NaN, denormal and huge too.
        data = random_bytes(n, row_bytes(type, k), seed=n)
        source = stored(QuantizedTensor(type, data, (n, k)))
        weight = packing.pack(source, native.library, native.pool)
        got = weight.unpack(native.library, native.pool)
        np.testing.assert_array_equal(got, dequantize(type, data).numpy())


@pytest.mark.parametrize("type", ROUNDED, ids=lambda type: type.name)
@pytest.mark.parametrize("largest", [1e-7, 1e-4, 0.01, 10.0])
def test_gguf_types_whose_scales_are_rounded(native, type, largest):
    source = with_scales(type, 20, 512, largest)
    weight = packing.pack(stored(source), native.library, native.pool)
    got = unpacked(native, weight)
    groups = got.view(20, -1, weight.spec.group)
    expected = source.dequantize().view_as(groups)
    top, bottom = expected.amax(-1, keepdim=True), expected.amin(-1, keepdim=True)
    magnitude = torch.maximum(top.abs(), bottom.abs()) + top - bottom
    # float16 has 11 bits, and below 2^-14 steps of 2^-24; an integer is at most 255.
    allowed = magnitude * 2**-11 + 2**-25 * 256
    assert ((groups - expected).abs() <= allowed).all()
    if largest >= 0.01:
        assert not torch.equal(groups, expected)  # else the test would not have met a rounding


@pytest.mark.parametrize("type", ROUNDED, ids=lambda type: type.name)
def test_a_scale_that_float16_cannot_hold_is_an_error(native, type):
    source = with_scales(type, 3, 256, 60000.0)
    with pytest.raises(EngineError, match=rf"{type.name} .*65504"):
        packing.pack(stored(source), native.library, native.pool)


def test_infinite_scales_stay_infinite(native):
    source = with_scales(GGMLType.Q4_K, 3, 256, 0.1)
    source.data.view(-1, 144)[1, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    weight = packing.pack(stored(source), native.library, native.pool)
    got = unpacked(native, weight)
    assert got[0].isfinite().all() and not got[1].isfinite().all() and got[2].isfinite().all()


@pytest.mark.parametrize("type", [*EXACT, *ROUNDED], ids=lambda type: type.name)
def test_packed_bytes_are_the_same_everywhere(native_on_any_level, type):
    """A packed model may be kept on disk, whatever processor reads it next."""
    native = native_on_any_level
    if type in ROUNDED:
        source = with_scales(type, 18, 512, 0.01)
    else:
        source = QuantizedTensor(type, random_bytes(18, row_bytes(type, 480)), (18, 480))
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
        m = d.ctypes.data if format in (abi.OCT_W4A, abi.OCT_W8A) else None
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
        ((9, 4, 4, 0), "unknown format 9"),
        ((abi.OCT_W4S, 0, 4, 32), r"\[0, 4\]"),
        ((abi.OCT_F32, 4, -1, 0), r"\[4, -1\]"),
        ((abi.OCT_W4S, 4, 32, 16), "groups of 16"),
        ((abi.OCT_W8S, 4, 32, 0), "groups of 0"),
        ((abi.OCT_BF16, 4, 32, 32), "groups of 32"),
        ((abi.OCT_F32, 2**31 - 1, 2**31 - 1, 0), "2147483647"),
    ],
)
def test_formats_that_do_not_exist(native, arguments, message):
    assert native.lib.oct_packed_bytes(*arguments) == abi.OCT_ERR_ARGUMENT
    with pytest.raises(EngineError, match=message):
        native.check(abi.OCT_ERR_ARGUMENT)


def test_what_cannot_be_packed(native):
    for type in (GGMLType.TQ1_0, GGMLType.I32):
        source = QuantizedTensor(type, random_bytes(2, row_bytes(type, 256)), (2, 256))
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
        (lambda: lib.oct_pack(pool, struct, None, source, None, source), "nothing to pack"),
        (lambda: lib.oct_unpack(pool, struct, None), "nowhere to"),
    ]:
        with pytest.raises(EngineError, match=message):
            native.check(call())
    spec = packing.plain_format(abi.OCT_W4S, 2, 33, 32, native.library)
    struct = ctypes.byref(spec.as_struct(out.ctypes.data))
    code = native.lib.oct_pack_gguf(native.pool, struct, GGMLType.Q4_0, source, source)
    with pytest.raises(EngineError, match="multiple of 32 values, not 33"):
        native.check(code)
