"""csrc/simd.h: sixteen lanes are the same on all instruction sets, bit for bit.

The program simd_probe.cpp applies every function to what it reads. It is compiled for each level,
and runs where the processor can; those of ARM under qemu, if there is a cross compiler.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.kernels.cpu.library import LEVELS as FEATURES
from octavo.system import machine

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "csrc" / "build.py"
ROWS = 4000
# NaN that an operation makes has a sign and payload of the processor's own.
MAKE_NAN = {"add", "sub", "mul", "div", "fma", "sum", "dot2", "exp", "silu", "tanh", "erf"}
MAKE_NAN |= {"gelu_tanh", "gelu_erf"}
VNNI_OF_AVX512 = """
#include <immintrin.h>
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
"""
ARM = ("neon", "neoni8mm")
OWN_ROUNDING = ("avx512bf16", "neoni8mm")  # of products of bfloat16
QEMU = ("aarch64-linux-gnu-g++", "qemu-aarch64")

pytestmark = pytest.mark.skipif(
    not BUILD.exists() or machine.compiler() is None, reason="needs the source tree and a compiler"
)


@pytest.fixture(scope="module")
def native_build():
    spec = importlib.util.spec_from_file_location("octavo_native_build", BUILD)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def probe(native_build, tmp_path_factory):
    """``probe(isa, mode, input)``: what the program of a level answers; skips if it cannot run."""
    folder = tmp_path_factory.mktemp("simd")
    levels = {level.name: level for level in native_build.LEVELS}
    programs: dict[str, list[str]] = {}

    def build(isa: str) -> list[str]:
        compiler, command, more = native_build.find_compiler(), [], []
        needed = FEATURES[isa]
        if isa in ARM and machine.cpu().architecture != "aarch64":
            if not all(map(shutil.which, QEMU)):
                pytest.skip(f"needs {' and '.join(QEMU)}")
            compiler, command, more = [QEMU[0]], [QEMU[1]], ["-static"]
        features = levels[isa].flags
        if isa == "avxvnni" and "avx_vnni" not in machine.cpu().isa:
            # The same instruction, encoded as AVX-512 does, for processors that have only that.
            header = folder / "vnni.h"
            header.write_text(VNNI_OF_AVX512)
            more = ["-mavx512vl", "-mavx512vnni", "-include", header]
            features, needed = levels["avx2"].flags, FEATURES["avx512vnni"]
        program = folder / isa
        flags = [flag for flag in native_build.FLAGS if flag != "-fPIC"]
        source = Path(__file__).with_name("simd_probe.cpp")
        done = subprocess.run(
            [*compiler, *flags, *native_build.OPTIMIZED, *features, *more,
             f"-I{ROOT / 'csrc'}", source, "-o", program],
            capture_output=True, text=True,
        )  # fmt: skip
        if "unrecognized command" in done.stderr or "unknown argument" in done.stderr:
            pytest.skip(f"the compiler does not know {isa}")
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr
        if not command and not set(needed) <= set(machine.cpu().isa):
            pytest.skip(f"compiles, but this processor cannot run {isa}")
        return [*command, str(program)]

    def run(isa: str, mode: str, data: bytes) -> bytes:
        if isa not in programs:
            programs[isa] = build(isa)
        done = subprocess.run([*programs[isa], mode], input=data, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1.17549435e-38, 3e-39]
    + [3.4028235e38, -3.4028235e38, 0.5, 1.5, 2.5, 88.72, 88.73, -87.3, -87.31, -103.9, 0.3, 1e-20],
    np.float32,
)


def some_floats(random: np.random.Generator, rows: int) -> np.ndarray:
    """Of any bits, of ordinary size, and special ones."""
    bits = random.integers(0, 2**32, (rows, 16), dtype=np.uint32).view(np.float32)
    ordinary = (random.standard_normal((rows, 16)) * 10).astype(np.float32)
    special = random.choice(SPECIAL, (rows, 16))
    which = random.integers(0, 3, (rows, 16))
    return np.choose(which, [bits.view(np.uint32), ordinary.view(np.uint32),
                             special.view(np.uint32)]).view(np.float32)  # fmt: skip


@pytest.fixture(scope="module")
def records() -> np.ndarray:
    """The inputs: struct Input of the program."""
    random = np.random.default_rng(1)
    lanes = (16,)
    kinds = [("a", "f4", lanes), ("b", "f4", lanes), ("c", "f4", lanes), ("finite", "f4", lanes)]
    kinds += [("integral", "f4", lanes), ("i", "i4", lanes), ("j", "i4", lanes)]
    kinds += [("exponent", "i4", lanes), ("bytes", "u1", (64,)), ("quad", "i1", (4,))]
    kinds += [("pairs", "u2", (32,)), ("other_pairs", "u2", (32,)), ("n", "i4")]
    table = np.zeros(ROWS, kinds)
    for name in "abc":
        table[name] = some_floats(random, ROWS)
    # Sums of products that nearly cancel, and ties: where one rounding is not two.
    with np.errstate(all="ignore"):
        table["c"][::3] = -table["a"][::3] * table["b"][::3]
        table["c"][1::3] = np.nextafter(table["a"][1::3] * table["b"][1::3], np.float32(0)) / 3e7
    table["finite"] = np.nan_to_num(some_floats(random, ROWS))
    table["integral"] = random.uniform(-1e6, 1e6, (ROWS, 16)).astype(np.float32)
    table["integral"][:, ::2] = random.integers(-200, 200, (ROWS, 8)) + np.float32(0.5)
    table["integral"][::50, 3] = -(2.0**31)
    table["i"] = random.integers(-(2**31), 2**31, (ROWS, 16))
    table["j"] = random.integers(-(2**31), 2**31, (ROWS, 16))
    table["exponent"] = random.integers(-126, 128, (ROWS, 16))
    table["bytes"] = random.integers(0, 256, (ROWS, 64))
    table["bytes"][::5] = random.choice([0, 1, 127, 128, 255], table["bytes"][::5].shape)
    table["quad"] = random.integers(-127, 128, (ROWS, 4))
    table["quad"][::5] = random.choice([-127, 127], table["quad"][::5].shape)
    table["pairs"] = random.integers(0, 2**16, (ROWS, 32))
    table["pairs"][: 2**16 // 32] = np.arange(2**16).reshape(-1, 32)  # each float16 there is
    table["other_pairs"] = random.integers(0, 2**16, (ROWS, 32))
    table["n"] = np.arange(ROWS) % 20
    return table


def primitives(answer: bytes) -> dict[str, bytes]:
    found, at = {}, 0
    while at < len(answer):
        end = answer.index(b"\n", at)
        name, size = answer[at:end].decode().split()
        found[name] = answer[end + 1 : end + 1 + int(size)]
        at = end + 1 + int(size)
    return found


def same_nan(result: bytes) -> np.ndarray:
    floats = np.frombuffer(result, np.float32)
    return np.where(np.isnan(floats), np.float32(np.nan), floats).view(np.uint32)


@pytest.fixture(scope="module")
def scalar(probe, records) -> dict[str, bytes]:
    return primitives(probe("scalar", "primitives", records.tobytes()))


@pytest.mark.parametrize("isa", ["avx2", "avxvnni", "avx512vnni", "avx512bf16", *ARM])
def test_all_levels_give_the_same_bits(isa, probe, records, scalar):
    found = primitives(probe(isa, "primitives", records.tobytes()))
    assert found.keys() == scalar.keys() and len(found) > 40
    for name, expected in scalar.items():
        if name == "dot2" and isa in OWN_ROUNDING:
            continue
        if name in MAKE_NAN:
            same = np.array_equal(same_nan(found[name]), same_nan(expected))
        else:
            same = found[name] == expected
        assert same, f"{name} differs"


@pytest.mark.parametrize("isa", OWN_ROUNDING)
def test_bf16_products_of_the_processor_are_nearly_those_of_all(isa, probe, records, scalar):
    """dot2 on ordinary numbers: its rounding differs, by little."""
    random = np.random.default_rng(2)
    records = records.copy()
    for name in ("pairs", "other_pairs"):
        values = random.standard_normal((ROWS, 32)).astype(np.float32)
        records[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    records["a"] = random.standard_normal((ROWS, 16))
    data = records.tobytes()
    expected = np.frombuffer(primitives(probe("scalar", "primitives", data))["dot2"], np.float32)
    found = primitives(probe(isa, "primitives", data))["dot2"]
    assert np.abs(np.frombuffer(found, np.float32) - expected).max() < 2e-6


class TestScalarIsWhatItSays:
    """The level that the others are compared with, compared with numpy."""

    def check(self, name, scalar, expected):
        found = np.frombuffer(scalar[name], expected.dtype).reshape(ROWS, -1)
        np.testing.assert_array_equal(found, expected.reshape(ROWS, -1))

    def test_arithmetic(self, scalar, records):
        with np.errstate(all="ignore"):
            a, b = records["a"], records["b"]
            for name, expected in {
                "add": a + b,
                "sub": a - b,
                "mul": a * b,
                "div": a / b,
                "max": np.where(a > b, a, b),
                "min": np.where(a < b, a, b),
                "abs": np.abs(a),
                "less": (a < b).astype(np.int32),
                "is_nan": np.isnan(a).astype(np.int32),
                "max_of": records["finite"].max(axis=1),
            }.items():
                self.check(name, scalar, expected)

    def test_fma_rounds_once(self, scalar, records):
        """Against long double, where its 64 bits hold the whole sum; processors know the rest."""
        if np.finfo(np.longdouble).nmant < 63:
            pytest.skip("long double is double here")
        with np.errstate(all="ignore"):
            a, b, c = (records[name].astype(np.longdouble) for name in "abc")
            exact = a * b + c
            known = (exact - a * b == c) & (exact - c == a * b)
            expected = exact.astype(np.float32)
        found = np.frombuffer(scalar["fma"], np.float32).reshape(ROWS, 16)
        assert known.mean() > 0.3
        np.testing.assert_array_equal(found[known], expected[known])

    def test_integers(self, scalar, records):
        i, j = records["i"], records["j"]
        self.check("add_i", scalar, i + j)
        self.check("sub_i", scalar, i - j)
        self.check("shift_right_1", scalar, i >> 1)
        self.check("to_float", scalar, i.astype(np.float32))
        self.check("to_int", scalar, np.rint(records["integral"]).astype(np.int32))
        self.check("power_of_two", scalar, np.exp2(records["exponent"].astype(float)).astype("f4"))
        self.check("store_s8", scalar, i.astype(np.int8))
        self.check("bits_of", scalar, i & 0x5A)
        bytes_ = records["bytes"].reshape(ROWS, -1)[:, :16]
        self.check("load_u8", scalar, bytes_.astype(np.int32))
        self.check("load_s8", scalar, bytes_.view(np.int8).astype(np.int32))

    def test_halves(self, scalar, records):
        f16 = records["pairs"][:, :16].copy().view(np.float16).astype(np.float32)
        self.check("load_f16", scalar, f16)
        bf16 = records["pairs"].astype(np.uint32) << 16
        self.check("load_bf16", scalar, bf16[:, :16].copy().view(np.float32))
        self.check("even", scalar, bf16[:, ::2].copy().view(np.float32))
        self.check("odd", scalar, bf16[:, 1::2].copy().view(np.float32))
        assert scalar["store_bf16"] == scalar["to_bf16"]
        import torch

        expected = torch.from_numpy(records["a"].copy()).to(torch.bfloat16).float().numpy()
        found = np.frombuffer(scalar["store_bf16"], np.uint16).astype(np.uint32) << 16
        np.testing.assert_array_equal(found.view(np.float32).reshape(ROWS, 16), expected)

    def test_products_of_bytes(self, scalar, records):
        quad = records["quad"].astype(np.int64)[:, None, :]
        bytes_ = records["bytes"].astype(np.int64).reshape(ROWS, 16, 4)
        centred = ((bytes_ - 128) * quad).sum(-1).astype(np.int32)
        self.check("centred", scalar, centred)
        table = bytes_.reshape(ROWS, -1)[:, :16]
        looked_up = np.take_along_axis(table, (bytes_ & 15).reshape(ROWS, -1), axis=1)
        for name, factors in (
            ("dot4", bytes_ & 127),
            ("low_nibbles", bytes_ & 15),
            ("high_nibbles", bytes_ >> 4),
            ("shifted_right", bytes_ >> 3),
            ("shifted_left", (bytes_ << 3) & 0x78),
            ("with_bits_of", (bytes_ & 15) | ((bytes_ >> 2) & 0x30)),
            ("look_up", looked_up.reshape(bytes_.shape) & 127),
        ):
            total = records["i"] + (factors * quad).sum(-1)
            self.check(name, scalar, total.astype(np.int32))
        next_bytes = records["pairs"].view(np.uint8).astype(np.int64).reshape(ROWS, 16, 4)
        weights = np.concatenate([bytes_, next_bytes], axis=-1) & 127
        rows = records["other_pairs"][:, :8].copy().view(np.int8).astype(np.int64)
        for row, name in enumerate(("two_rows_first", "two_rows_second")):
            of_row = (weights * rows[:, None, 8 * row : 8 * row + 8]).sum(-1)
            self.check(name, scalar, ((2 + row) * (5 + 2 * row + of_row)).astype(np.float32))
        total = records["i"] + 8 * ((bytes_ & 15) * quad).sum(-1)
        self.check("add_nibbles", scalar, total.astype(np.int32))
        total = records["i"] + (((bytes_ & 63) + (bytes_ >> 2)) * quad).sum(-1)
        self.check("dot4_twice", scalar, total.astype(np.int32))

    def test_the_first_lanes(self, scalar, records):
        inside = np.arange(16) < records["n"][:, None]
        bits = {name: records[name].view(np.uint32).reshape(ROWS, 16) for name in "ab"}
        assert scalar["load_first"] == np.where(inside, bits["a"], 0).astype(np.uint32).tobytes()
        assert scalar["store_first"] == np.where(inside, bits["a"], bits["b"]).tobytes()


REFERENCE = {
    "exp": (np.exp, 3e-7),
    "silu": (lambda x: x / (1 + np.exp(-x)), 5e-7),
    "tanh": (np.tanh, 5e-7),
}


def inputs_of(name: str) -> np.ndarray:
    """A dense sample of where the function is neither 0 nor infinite, and near 0."""
    random = np.random.default_rng(3)
    limit = {"exp": 87.3, "silu": 80.0, "tanh": 12.0}[name]
    wide = random.uniform(-limit, limit, 1 << 20)
    near = random.standard_normal(1 << 18) * 0.3
    tiny = np.exp(random.uniform(-60, 0, 1 << 18)) * random.choice([-1, 1], 1 << 18)
    return np.concatenate([wide, near, tiny]).astype(np.float32)


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("isa", ["avx2", "avx512vnni", *ARM])
def test_functions_are_accurate(name, isa, probe):
    reference, tolerance = REFERENCE[name]
    x = inputs_of(name)
    found = np.frombuffer(probe(isa, name, x.tobytes()), np.float32).astype(np.float64)
    expected = reference(x.astype(np.float64))
    error = np.abs(found / expected - 1)
    worst = int(error.argmax())
    print(f"{name} {isa}: {error[worst]:.3g} at {x[worst]!r}")
    assert error[worst] < tolerance, f"{name}({x[worst]!r}): {found[worst]!r}"


def test_erf_is_accurate_in_absolute_terms(probe):
    x = np.concatenate([np.linspace(-5, 5, 1 << 12), SPECIAL]).astype(np.float32)
    x = np.resize(x[~np.isnan(x)], (1 << 12) + 16)
    found = np.frombuffer(probe("scalar", "erf", x.tobytes()), np.float32)
    expected = np.array([math.erf(value) for value in x.tolist()])
    assert np.abs(found - expected).max() < 4e-7
    flipped = np.frombuffer(probe("scalar", "erf", (-x).tobytes()), np.float32)
    np.testing.assert_array_equal(flipped, -found)


def test_functions_at_their_ends(probe):
    def values(name, *x):
        data = np.resize(np.array(x, np.float32), 16)
        return np.frombuffer(probe("scalar", name, data.tobytes()), np.float32)[: len(x)].tolist()

    inf, nan = float("inf"), float("nan")
    assert values("exp", 0.0, -0.0, -inf, inf, -87.4, -1000, 88.8, 1e30) == [
        *(1.0, 1.0, 0.0, inf, 0.0, 0.0, inf, inf)
    ]
    assert values("exp", 88.72)[0] == pytest.approx(np.exp(np.float32(88.72)), rel=3e-7)
    assert values("tanh", inf, -inf, 50, -50, 0.0) == [1.0, -1.0, 1.0, -1.0, 0.0]
    assert values("silu", 0.0, 100.0, inf) == [0.0, 100.0, inf]
    assert np.isnan([*values("exp", nan), *values("tanh", nan), *values("silu", nan)]).all()
