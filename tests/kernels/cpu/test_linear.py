"""The native linear: products, what comes before and after them, and that rows stay alone.

The oracle of quantized formats rounds activations as csrc/activations.h says, and then computes in
float64; so what is left to tolerate is the rounding of float32 sums.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from weights import stored

from octavo.base.errors import EngineError
from octavo.kernels import reference
from octavo.kernels.cpu import abi, layout, packing
from octavo.quantization.coded import CodedWeight, PlainCodes
from octavo.quantization.ggml_types import GGMLType, block_shape, row_bytes
from octavo.quantization.levels import E4M3, FP4_LEVELS, NF4_LEVELS
from octavo.quantization.tensors import BlockTensor

# Types of files for the formats that nothing else becomes.
NESTED = (
    *(GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K),
    GGMLType.IQ4_XS,
)
FORMATS = [
    *((abi.OCT_W2S, 64), (abi.OCT_W2A, 32), (abi.OCT_W3S, 32), (abi.OCT_W3A, 128)),
    *((abi.OCT_W4S, group) for group in (32, 64, 128)),
    *((abi.OCT_W4A, group) for group in (32, 64, 128)),
    *((abi.OCT_W8S, group) for group in (32, 128)),
    *((abi.OCT_W8A, group) for group in (32, 64)),
    *((abi.OCT_W5S, 32), (abi.OCT_W5A, 32), (abi.OCT_W4N, 32)),
    *((abi.OCT_W4F, 16), (abi.OCT_W4F, 32)),
    *(layout.PACKED_FORMATS[type] for type in NESTED),
    (abi.OCT_BF16, 0),
    (abi.OCT_F16, 0),
    (abi.OCT_F32, 0),
    *((format, group) for format, (_, group) in layout.CODE_FORMATS.items()),
]
# Where the float16 scales of a block are.
HALVES = {
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_XS: (0,),
}
# (n, k): less and more than a tile, a group, a register, a line.
SHAPES = [(1, 33), (7, 1), (16, 32), (17, 31), (100, 96), (49, 576), (33, 1000)]
NESTED_SHAPES = [(1, 256), (17, 512), (100, 1280)]  # whole blocks
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 33]


FLOATS = {
    abi.OCT_F32: torch.float32,
    abi.OCT_F16: torch.float16,
    abi.OCT_BF16: torch.bfloat16,
}


LEVELS = {abi.OCT_NF4: NF4_LEVELS, abi.OCT_FP4: FP4_LEVELS, abi.OCT_E4M3: E4M3}


def is_nested(format):
    return format in layout.INTEGER_FORMATS and layout.INTEGER_FORMATS[format].nested_group > 0


def make_weight(native, format, group, n, k, seed=0):
    """A packed random matrix, and what it stands for as float64 [n, k]."""
    rng = np.random.default_rng(seed)
    if format in FLOATS:
        values = torch.from_numpy(rng.normal(size=(n, k))).to(FLOATS[format])
        return packing.pack(stored(values), native.library, native.pool), values.double().numpy()
    if is_nested(format):
        return make_nested_weight(native, format, n, k, rng)
    if format in layout.CODE_FORMATS:
        return make_coded_weight(native, format, n, k, rng)
    traits = layout.INTEGER_FORMATS[format]
    spec = packing.plain_format(format, n, k, group, native.library)
    q = rng.integers(0, 1 << traits.bits, (n, k))
    groups = -(-k // group)
    d = rng.normal(size=(n, groups)).astype(np.float16)
    m = rng.normal(size=(n, groups)).astype(np.float16) if traits.has_min else None
    weight = packing.pack_integers(spec, q.astype(np.uint8), d, m, native.library, native.pool)
    return weight, weight.unpack(native.library, native.pool).astype(np.float64)


def make_coded_weight(native, format, n, k, rng):
    """Random codes of floats."""
    bits, group = layout.CODE_FORMATS[format]
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    levels = LEVELS[format]
    scales = rng.normal(size=(n, -(-k // group))).astype(np.float32) / np.nanmax(levels)
    weight = CodedWeight("", (n, k), bits, group, PlainCodes(codes), scales, 0.0, 0, levels)
    return packing.pack(weight, native.library, native.pool), weight.dequantize().astype(float)


def make_nested_weight(native, format, n, k, rng):
    """Random blocks of the type that becomes ``format``, but for their float16 scales."""
    type = next(type for type in NESTED if layout.PACKED_FORMATS[type][0] == format)
    data = rng.integers(0, 256, (n, row_bytes(type, k)), dtype=np.uint8)
    blocks = data.reshape(-1, block_shape(type)[1])
    for at in HALVES[type]:
        halves = rng.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    source = BlockTensor(type, torch.from_numpy(data), (n, k))
    weight = packing.pack(stored(source), native.library, native.pool)
    return weight, source.dequantize().double().numpy()


def rounded(x, format, group, remainder_above=math.inf):
    """Activations as the kernels of a format see them: float64 [rows, k]."""
    if format in (abi.OCT_F16, abi.OCT_F32, *layout.CODE_FORMATS):
        return x.astype(np.float64)
    if format == abi.OCT_BF16:
        return torch.from_numpy(x).bfloat16().double().numpy()
    rows, k = x.shape
    span = max(group, 32)
    spans = np.zeros((rows, -(-k // span), span), dtype=np.float32)
    spans.reshape(rows, -1)[:, :k] = x
    largest = np.abs(spans).max(axis=-1, keepdims=True)
    factor = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
    integers = np.rint(spans * factor).astype(np.float64)
    scales = (largest / np.float32(127)).astype(np.float64)
    rms = np.sqrt(np.square(x.astype(np.float64)).mean(axis=-1))[:, None, None]
    limit = remainder_above * rms if remainder_above < math.inf else math.inf
    left = (spans - integers * scales).astype(np.float32)
    second = np.float32(254) / np.where(scales > 0, scales, 1).astype(np.float32)
    remainders = np.rint(left * second).astype(np.float64) / 254
    integers += np.where(largest > limit, remainders, 0)
    return (integers * scales).reshape(rows, -1)[:, :k]


@dataclass
class Segment:
    weight: packing.PackedWeight
    bias: np.ndarray | None = None


@dataclass
class Call:
    """A linear, and the arrays that it reads and writes. What may not be touched is NaN or -7."""

    segments: list[Segment]
    x: np.ndarray
    epilogue: int = abi.OCT_EPI_NONE
    row_index: np.ndarray | None = None
    add: np.ndarray | None = None
    add_norm: np.ndarray | None = None
    norm: np.ndarray | None = None
    residual: np.ndarray | None = None
    in_place: bool = False  # y is the residual
    remainder_above: float = math.inf
    softcap: float = 0.0
    logits_of: tuple[int, ...] = ()
    kept: list = field(default_factory=list)

    def run(self, native, pool=None):
        args = self.arguments()
        native.check(native.lib.oct_linear(pool or native.pool, ctypes.byref(args)))
        for y, segment in zip(self.y, self.segments, strict=False):
            assert (y[:, segment.weight.spec.n :] == -7).all()
        return [y[:, : s.weight.spec.n] for y, s in zip(self.y, self.segments, strict=False)]

    def arguments(self):
        rows = len(self.x) if self.row_index is None else len(self.row_index)
        k = self.x.shape[1]
        wide = np.full((len(self.x), k + 5), np.nan, dtype=np.float32)
        wide[:, :k] = self.x
        args = abi.LinearArgs(rows=rows, k=k, ldin=k + 5, eps=1e-5, add_eps=1e-6)
        args.remainder_above = self.remainder_above
        setattr(args, "in", self.at(wide))
        if self.row_index is not None:
            args.row_index = self.at(self.row_index.astype(np.int32))
        if self.add is not None:
            added = np.full((rows, k + 5), np.nan, dtype=np.float32)
            added[:, :k] = self.add
            self.sum = np.full((rows, k + 5), -7, dtype=np.float32)
            args.add, args.x_out = self.at(added), self.at(self.sum)
        args.add_norm, args.norm = self.at(self.add_norm), self.at(self.norm)
        args.epilogue, args.num_segments = self.epilogue, len(self.segments)
        self.y = []
        for target, segment in zip(args.segments, self.segments, strict=False):
            n = segment.weight.spec.n
            target.weight, target.bias = segment.weight.as_struct(), self.at(segment.bias)
            if self.epilogue == abi.OCT_EPI_HEAD or (self.is_gated and self.y):
                continue
            self.y.append(np.full((rows, n + 3), -7, dtype=np.float32))
            if self.residual is not None:
                residual = self.y[0] if self.in_place else self.y[0].copy()
                residual[:, :n] = self.residual
                args.residual = self.at(residual)
            target.y, target.ldy = self.at(self.y[-1]), n + 3
        if self.epilogue == abi.OCT_EPI_HEAD:
            vocab = self.segments[0].weight.spec.n
            self.best, self.ids = np.full(rows, -7, np.float32), np.full(rows, -7, np.int32)
            self.logits = {r: np.full(vocab + 3, -7, np.float32) for r in self.logits_of}
            pointers = (ctypes.c_void_p * rows)()
            for r, row in self.logits.items():
                pointers[r] = self.at(row)
            head = abi.Head(ctypes.addressof(pointers), self.at(self.best), self.at(self.ids))
            head.softcap = self.softcap
            self.kept += [pointers, head]
            args.head = ctypes.pointer(head)
        return args

    @property
    def is_gated(self):
        return abi.OCT_EPI_SILU_MUL <= self.epilogue <= abi.OCT_EPI_GELU_ERF_MUL

    def at(self, array):
        if array is None:
            return None
        assert array.flags.c_contiguous and array.dtype in (np.float32, np.int32)
        self.kept.append(array)
        return array.ctypes.data


def activations(rows, k, seed=0):
    return np.random.default_rng([seed, k]).normal(size=(rows, k)).astype(np.float32)


def assert_same(got, expected):
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


def rmsnorm(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize(
    ("format", "group", "above"),
    [
        *((*of, math.inf) for of in FORMATS),
        *((*of, some) for of in FORMATS if of[0] in layout.INTEGER_FORMATS for some in (2.5, 0.0)),
    ],
)
def test_products(native, make_pool, format, group, above):
    """Against float64, for all shapes, or the largest two where activations have remainders; and
    each row has the same bits whoever else is there."""
    pools = [make_pool(1), native.pool, make_pool(3)]
    shapes = NESTED_SHAPES if is_nested(format) else SHAPES
    for n, k in shapes if above == math.inf else shapes[-2:]:
        weight, values = make_weight(native, format, group, n, k)
        x = activations(130, k)
        [y] = Call([Segment(weight)], x, remainder_above=above).run(native)
        seen = rounded(x, format, group, above)
        scale = np.abs(seen) @ np.abs(values).T + 1e-30
        # bf16 instructions round differently; sums of k float32 have errors of k^0.5 units.
        assert (np.abs(y - seen @ values.T) / scale).max() < 2e-6, (n, k)
        for i, rows in enumerate(ROWS):
            start = (7 * i) % 90
            some = Call([Segment(weight)], x[start : start + rows], remainder_above=above)
            assert_same(some.run(native, pools[i % 3])[0], y[start : start + rows])
        [alone] = Call([Segment(weight)], x[129:], remainder_above=above).run(native, pools[0])
        assert_same(alone, y[129:])


def extreme_activations(k, group):
    """Whole numbers of which the largest in each group is 127, so that its scale is 1."""
    x = np.random.default_rng(0).integers(-127, 128, (12, k)).astype(np.float32)
    x[0], x[1], x[2, ::2], x[2, 1::2] = 127, -127, 127, -127
    x[:, :: max(group, 32)] = 127
    return x


def check_exactly(native, weight, values, x):
    expected = x.astype(np.int64) @ values.astype(np.int64).T
    assert np.abs(expected).max() < 2**24
    for rows in (1, 4, 12):
        [y] = Call([Segment(weight)], x[:rows]).run(native)
        np.testing.assert_array_equal(y, expected[:rows])


@pytest.mark.parametrize(
    ("format", "group"), [p for p in FORMATS if p[0] in layout.INTEGER_FORMATS]
)
def test_integers_are_exact(native, format, group):
    """Scales of 1 and whole numbers, the largest there are: nothing may saturate or be rounded."""
    if is_nested(format):
        pytest.skip("see test_nested_integers_are_exact")
    traits = layout.INTEGER_FORMATS[format]
    rng = np.random.default_rng(0)
    n, k, top = 48, 2 * group, (1 << traits.bits) - 1
    q = rng.integers(0, top + 1, (n, k), dtype=np.uint8)
    q[:8], q[8:16] = 0, top
    ones = np.ones((n, k // group), dtype=np.float16)
    spec = packing.plain_format(format, n, k, group, native.library)
    mins = ones * 3 if traits.has_min else None
    weight = packing.pack_integers(spec, q, ones, mins, native.library, native.pool)
    values = weight.unpack(native.library, native.pool)
    check_exactly(native, weight, values, extreme_activations(k, group))


@pytest.mark.parametrize("type", NESTED, ids=lambda type: type.name)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x5A])
def test_nested_integers_are_exact(native, type, byte):
    """The same where scales have scales: those of blocks are 1, and all other bytes the same."""
    n, k = 20, 256
    data = np.full((n, row_bytes(type, k)), byte, dtype=np.uint8)
    for at in HALVES[type]:
        data[:, at : at + 2] = np.ones(1, dtype=np.float16).view(np.uint8)
    source = BlockTensor(type, torch.from_numpy(data), (n, k))
    weight = packing.pack(stored(source), native.library, native.pool)
    x = extreme_activations(k, 32)
    only = np.arange(k) // 32 == np.arange(len(x))[:, None] % 8  # more would be rounded
    check_exactly(native, weight, source.dequantize().numpy(), x * only)


@pytest.mark.parametrize("type", [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.Q6_K])
def test_near_the_reference(native, type):
    """The whole of it: a GGUF weight and float32 activations, rounded to int8 in the kernel."""
    n, k = 64, 512
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (n, row_bytes(type, k)), generator=generator, dtype=torch.uint8)
    size = row_bytes(type, 256 if type == GGMLType.Q6_K else 32)
    blocks = data.view(-1, size)
    for at in {GGMLType.Q4_1: (0, 2), GGMLType.Q6_K: (208,)}.get(type, (0,)):
        scale = torch.rand(len(blocks), generator=generator) * 0.01 + 0.001
        blocks[:, at : at + 2] = scale.half().view(torch.uint8).view(-1, 2)
    source = BlockTensor(type, data, (n, k))
    x = activations(5, k)
    [y] = Call([Segment(packing.pack(stored(source), native.library, native.pool))], x).run(native)
    expected = reference.linear(torch.from_numpy(x), source).numpy()
    assert np.abs(y - expected).max() < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("format", [abi.OCT_W4S, abi.OCT_K6S])
def test_with_remainders_activations_have_fifteen_bits(native, format):
    """So products are nearly those of numbers that are not rounded at all."""
    n, k = 40, 512
    weight, values = make_weight(native, format, 16 if format == abi.OCT_K6S else 32, n, k)
    x = activations(9, k)
    errors = []
    for above in (math.inf, 0.0):
        [y] = Call([Segment(weight)], x, remainder_above=above).run(native)
        errors.append(np.sqrt(np.square(y - x.astype(np.float64) @ values.T).mean()))
    assert errors[1] < errors[0] / 200


@pytest.mark.parametrize("rows", [3, 8, 21])
@pytest.mark.parametrize("format", [abi.OCT_F32, abi.OCT_W4A])
def test_prologues(native, rows, format):
    k, n = 161, 40
    weight, values = make_weight(native, format, 32 if format == abi.OCT_W4A else 0, n, k)
    rng = np.random.default_rng(1)
    x, add = activations(rows, k, seed=1) * 3, activations(rows, k, seed=2)
    norm, add_norm = (rng.normal(size=k).astype(np.float32) for _ in range(2))
    for has_add, has_add_norm, has_norm, has_index in np.ndindex(2, 2, 2, 2):
        if has_add_norm and not has_add:
            continue
        call = Call([Segment(weight)], x)
        picked = x
        if has_index:
            call.row_index = rng.integers(0, rows, rows)
            picked = x[call.row_index]
        total = picked.astype(np.float64)
        if has_add:
            call.add = add
            call.add_norm = add_norm if has_add_norm else None
            total = total + (rmsnorm(add, add_norm, 1e-6) if has_add_norm else add)
        call.norm = norm if has_norm else None
        [y] = call.run(native)
        seen = rmsnorm(total, norm, 1e-5) if has_norm else total
        if has_add:
            np.testing.assert_allclose(call.sum[:, :k], total, rtol=1e-6, atol=1e-6)
            assert (call.sum[:, k:] == -7).all()
        if format == abi.OCT_F32:
            scale = np.abs(seen) @ np.abs(values).T
            assert (np.abs(y - seen @ values.T) / scale).max() < 1e-6
        else:  # an integer may be rounded the other way: what comes before it is not exact here
            np.testing.assert_allclose(y, seen @ values.T, atol=0.02 * np.abs(y).max())


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x, approximate):
    return torch.nn.functional.gelu(torch.from_numpy(x), approximate=approximate).numpy()


GATES = {
    abi.OCT_EPI_SILU_MUL: silu,
    abi.OCT_EPI_GELU_TANH_MUL: lambda x: gelu(x, "tanh"),
    abi.OCT_EPI_GELU_ERF_MUL: lambda x: gelu(x, "none"),
}


@pytest.mark.parametrize("rows", [1, 5, 8, 30])
@pytest.mark.parametrize("n", [16, 33, 100])
def test_epilogues(native, rows, n):
    k = 96
    x, rng = activations(rows, k), np.random.default_rng(2)
    first, values = make_weight(native, abi.OCT_F32, 0, n, k, seed=1)
    second, more = make_weight(native, abi.OCT_F32, 0, n, k, seed=2)
    biases = [rng.normal(size=n).astype(np.float32) for _ in range(2)]
    residual = rng.normal(size=(rows, n)).astype(np.float32)
    y, z = (x @ v.T for v in (values, more))
    close = {"rtol": 3e-6, "atol": 3e-5}
    for bias, gate_bias in ((None, None), biases):
        total = y if bias is None else y + bias
        segments = [Segment(first, bias), Segment(second, gate_bias)]
        got = Call(segments, x).run(native)
        np.testing.assert_allclose(got[0], total, **close)
        np.testing.assert_allclose(got[1], z if bias is None else z + gate_bias, **close)
        plain = Call(segments[:1], x, abi.OCT_EPI_RESIDUAL, residual=residual)
        [apart] = plain.run(native)
        np.testing.assert_allclose(apart, residual + total, **close)
        plain.in_place = True
        [in_place] = plain.run(native)
        assert_same(np.ascontiguousarray(in_place), np.ascontiguousarray(apart))
        for epilogue, function in GATES.items():
            [got] = Call(segments, x, epilogue).run(native)
            expected = function(total) * (z if bias is None else z + gate_bias)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-4)


def test_activation_functions(native):
    """Far out and near zero: one input, weights of 1, so that the products are the input."""
    points = np.concatenate([np.linspace(-12, 12, 1201), [0, -0.0, 1e-20, 90, -90, 1e30, -1e30]])
    x = points.astype(np.float32)[:, None]
    one = packing.pack(stored(torch.ones(1, 1)), native.library, native.pool)
    bias = np.ones(1, dtype=np.float32)
    zero = packing.pack(stored(torch.zeros(1, 1)), native.library, native.pool)
    for epilogue, function in GATES.items():
        [y] = Call([Segment(one), Segment(zero, bias)], x, epilogue).run(native)
        with np.errstate(over="ignore"):
            expected = function(x.astype(np.float64))
        np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("above", [math.inf, 2.5])
@pytest.mark.parametrize("rows", [1, 4, 8, 20])
def test_segments_of_different_formats(native, rows, above):
    """One node may have four encodings of the same activations; each is as if alone."""
    k = 512
    x, norm = activations(rows, k), np.random.default_rng(3).normal(size=k).astype(np.float32)
    kinds = [(abi.OCT_W4A, 32), (abi.OCT_BF16, 0), (abi.OCT_K6S, 16), (abi.OCT_F32, 0)]
    segments = [
        Segment(make_weight(native, *kind, n, k, seed=n)[0])
        for kind, n in zip(kinds, (70, 1, 33, 16), strict=True)
    ]
    together = Call(segments, x, norm=norm, remainder_above=above).run(native)
    for segment, y in zip(segments, together, strict=True):
        [alone] = Call([segment], x, norm=norm, remainder_above=above).run(native)
        assert_same(np.ascontiguousarray(y), np.ascontiguousarray(alone))
    gate, up = segments[0], Segment(make_weight(native, abi.OCT_K6S, 16, 70, k)[0])
    call = Call([gate, up], x, abi.OCT_EPI_SILU_MUL, remainder_above=above)
    [mixed] = call.run(native)
    a, b = (
        Call([s], x, remainder_above=above).run(native)[0].astype(np.float64) for s in (gate, up)
    )
    with np.errstate(over="ignore"):
        expected = silu(a) * b
    np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-5)


def scattered_weight(n, k, group, order):
    """4 bits whose groups are scattered over the inputs."""
    rng = np.random.default_rng(n)
    codes = PlainCodes(rng.integers(0, 16, (n, k), dtype=np.uint8))
    scales = rng.normal(size=(n, -(-k // group))).astype(np.float16).astype(np.float32)
    groups = (order // group).astype(np.int32)
    return CodedWeight("", (n, k), 4, group, codes, scales, 8.0, 0, groups=groups)


@pytest.mark.parametrize("above", [math.inf, 2.5])
def test_columns_in_another_order(native, above):
    """Segments of several orders: each sees the inputs in its own, and rows stay alone."""
    k, rng = 320, np.random.default_rng(0)
    x, order = activations(40, k), rng.permutation(k)
    weights = [
        scattered_weight(40, k, 64, order),
        scattered_weight(17, k, 64, order),  # the same order, in its own memory
        scattered_weight(20, k, 32, rng.permutation(k)),
    ]
    segments = [Segment(packing.pack(w, native.library, native.pool)) for w in weights]
    segments.append(Segment(make_weight(native, abi.OCT_W4S, 64, 8, k)[0]))
    together = Call(segments, x, remainder_above=above).run(native)
    for segment, y in zip(segments, together, strict=True):
        for rows in (1, 3, 8, 9, 40):
            [alone] = Call([segment], x[:rows], remainder_above=above).run(native)
            assert_same(np.ascontiguousarray(y[:rows]), np.ascontiguousarray(alone))
    for weight, y in zip(weights, together, strict=False):
        columns = np.argsort(weight.groups, kind="stable")
        seen = rounded(x[:, columns], abi.OCT_W4S, weight.group_size, above)
        values = weight.dequantize().astype(np.float64)[:, columns]
        scale = np.abs(seen) @ np.abs(values).T
        assert (np.abs(y - seen @ values.T) / scale).max() < 2e-6


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_head(native, make_pool, rows, softcap):
    n, k = 1003, 64
    weight, values = make_weight(native, abi.OCT_W8S, 32, n, k)
    x = activations(rows, k) * 0.05
    [logits] = Call([Segment(weight)], x).run(native)
    results = []
    for pool in (make_pool(1), native.pool, make_pool(3)):
        call = Call([Segment(weight)], x, abi.OCT_EPI_HEAD, softcap=softcap)
        call.logits_of = tuple(range(0, rows, 2))
        call.run(native, pool)
        results.append((call.best, call.ids))
        for r, row in call.logits.items():
            expected = logits[r].astype(np.float64)
            if softcap:
                expected = softcap * np.tanh(expected / softcap)
            np.testing.assert_allclose(row[:n], expected, rtol=1e-5, atol=1e-7)
            assert (row[n:] == -7).all()
            assert call.ids[r] == row[:n].argmax() and call.best[r] == row[:n].max()
    for best, ids in results:
        assert_same(best, results[0][0])
        np.testing.assert_array_equal(ids, results[0][1])
    if not softcap:
        np.testing.assert_array_equal(results[0][1], logits.argmax(axis=1))


@pytest.mark.parametrize("rows", [1, 12])
def test_head_of_equal_and_odd_logits(native, make_pool, rows):
    """One input that is 1: the logits are the weights."""
    x = np.ones((rows, 1), dtype=np.float32)
    inf, nan = float("inf"), float("nan")
    for pool in (native.pool, make_pool(3)):
        for n, special, best, best_id in [
            (100, {}, 0.0, 0),
            (100, {40: 2.0, 41: 2.0, 99: 2.0}, 2.0, 40),
            (100, {24: 2.0, 39: 2.0, 7: 1.0}, 2.0, 24),  # another lane, another tile
            (33, {32: 5.0}, 5.0, 32),
            (50, {20: inf, 30: inf}, inf, 20),
            (50, {20: inf, 48: nan}, nan, None),
            (50, {3: nan, 20: inf}, nan, None),
            (50, dict.fromkeys(range(50), -inf), -inf, 0),
            (50, {**dict.fromkeys(range(50), -inf), 17: -5.0}, -5.0, 17),
            (50, {**dict.fromkeys(range(50), -0.0), 30: 0.0}, 0.0, 0),
            (50, dict.fromkeys(range(50), -3.0), -3.0, 0),
        ]:
            values = torch.zeros(n, 1)
            for i, value in special.items():
                values[i] = value
            weight = packing.pack(stored(values), native.library, native.pool)
            call = Call([Segment(weight)], x, abi.OCT_EPI_HEAD)
            call.run(native, pool)
            np.testing.assert_array_equal(call.best, np.full(rows, best, np.float32))
            if best_id is not None:
                np.testing.assert_array_equal(call.ids, np.full(rows, best_id))


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_damage_is_seen_and_stays_in_its_row(native, format, group, bad):
    n, k = 40, 256 if is_nested(format) else 200
    weight, _ = make_weight(native, format, group, n, k)
    for rows in (3, 20):
        x = activations(rows, k)
        [good] = Call([Segment(weight)], x).run(native)
        x[1, 150] = bad
        [y] = Call([Segment(weight)], x).run(native)
        assert not np.isfinite(y[1]).any()
        others = np.arange(rows) != 1
        assert_same(y[others], good[others])
        normed = Call([Segment(weight)], x, norm=np.ones(k, dtype=np.float32))
        assert not np.isfinite(normed.run(native)[0][1]).any()


@pytest.mark.parametrize(("format", "group"), [(abi.OCT_W4A, 32), (abi.OCT_K6S, 16)])
def test_tiny_and_huge_activations(native, format, group):
    weight, values = make_weight(native, format, group, 20, 256)
    for magnitude in (0.0, 1e-44, 1e-38, 1e-33, 1e-25, 1e25):
        x = activations(2, 256) * np.float32(magnitude)
        [y] = Call([Segment(weight)], x).run(native)
        expected = x.astype(np.float64) @ values.T
        assert np.abs(y - expected).max() <= 0.03 * np.abs(expected).max() + 1e-27


def test_no_rows_are_nothing(native):
    weight, _ = make_weight(native, abi.OCT_F32, 0, 4, 4)
    [y] = Call([Segment(weight)], np.zeros((0, 4), dtype=np.float32)).run(native)
    assert y.shape == (0, 4)
    Call([Segment(weight)], np.zeros((0, 4), dtype=np.float32), abi.OCT_EPI_HEAD).run(native)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: setattr(a, "rows", -1), "-1 rows"),
        (lambda a: setattr(a, "k", 0), "0 inputs"),
        (lambda a: setattr(a, "k", 31), "has 32 inputs, its activations have 31"),
        (lambda a: setattr(a, "ldin", 31), "rows of 31 floats for 32 inputs"),
        (lambda a: setattr(a, "in", None), "no input"),
        (
            lambda a: setattr(a, "remainder_above", -1),
            "remainder_above -1: it must not be negative",
        ),
        (lambda a: setattr(a, "remainder_above", math.nan), "remainder_above nan"),
        (lambda a: setattr(a, "epilogue", 99), "unknown epilogue 99"),
        (lambda a: setattr(a, "num_segments", 0), "has 0 segments"),
        (lambda a: setattr(a, "num_segments", 5), "has 5 segments"),
        (lambda a: setattr(a, "epilogue", abi.OCT_EPI_RESIDUAL), "no residual"),
        (lambda a: setattr(a, "epilogue", abi.OCT_EPI_SILU_MUL), "has 1 segments"),
        (lambda a: setattr(a, "epilogue", abi.OCT_EPI_HEAD), "no best_logit or best_id"),
        (lambda a: setattr(a, "add", getattr(a, "in")), "x_out"),
        (lambda a: setattr(a, "add_norm", getattr(a, "in")), "but add is NULL"),
        (lambda a: setattr(a.segments[0], "y", None), "no y"),
        (lambda a: setattr(a.segments[0], "ldy", 3), "rows of 3 floats for 4 outputs"),
        (lambda a: setattr(a.segments[0].weight, "data", None), "64 bytes"),
        (lambda a: setattr(a.segments[0].weight, "data", a.segments[0].weight.data + 4), "64 byte"),
        (lambda a: setattr(a.segments[0].weight, "format", 24), "unknown format 24"),
        (lambda a: setattr(a.segments[0].weight, "group", 48), "groups of 48"),
    ],
)
def test_arguments_that_make_no_sense(native, change, message):
    weight, _ = make_weight(native, abi.OCT_W4S, 32, 4, 32)
    args = Call([Segment(weight)], activations(2, 32)).arguments()
    change(args)
    assert native.lib.oct_linear(native.pool, ctypes.byref(args)) == abi.OCT_ERR_ARGUMENT
    with pytest.raises(EngineError, match=message):
        native.check(abi.OCT_ERR_ARGUMENT)
