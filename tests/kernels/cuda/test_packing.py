"""Weights of files on the device: the numbers of the file, in what kernels read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coded_weights import coded, scattered
from device_weights import e4m3, rounding, stored
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.cuda import packing
from octavo.kernels.cuda.packing import expanded, pack
from octavo.kernels.cuda.products import GemmFusion, PlainProducts
from octavo.kernels.cuda.weights import TILE_K, DenseWeight, JoinedWeight, W4Weight, W8Weight
from octavo.kernels.op_arguments import RowNorm
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.levels import E2M1, E5M2, NF4_LEVELS

# Of the largest number of a matrix: exact, or with scales rounded to 11 bits, or mins too.
EXACT, ROUNDED = 0.0, 2.0**-10

BLOCKS = {
    GGMLType.Q4_0: ("4 bits in 32", 4.5, EXACT),
    GGMLType.Q4_1: ("4 bits in 32", 5.0, EXACT),
    GGMLType.Q4_K: ("4 bits in 32", 5.0, ROUNDED),
    GGMLType.Q2_K: ("4 bits in 16", 6.0, ROUNDED),
    GGMLType.Q3_K: ("4 bits in 16", 5.0, ROUNDED),
    GGMLType.Q5_0: ("int8 in 32", 8.5, EXACT),
    GGMLType.Q5_1: ("int8 in 32", 9.0, EXACT),
    GGMLType.Q5_K: ("int8 in 32", 9.0, ROUNDED),
    GGMLType.Q6_K: ("int8 in 16", 9.0, ROUNDED),
    GGMLType.Q8_0: ("int8 in 32", 8.5, EXACT),
    GGMLType.IQ4_NL: ("int8 in 32", 8.5, EXACT),
    GGMLType.IQ4_XS: ("int8 in 32", 8.5, ROUNDED),
    GGMLType.F16: ("float32", 32.0, EXACT),
    GGMLType.BF16: ("float32", 32.0, EXACT),
}


CODED = {
    "groups of 32": (lambda: coded(40, 96, 4, 32), "4 bits in 32", ROUNDED),
    "groups of 64": (lambda: coded(24, 1216, 4, 64, zeros=8.0), "4 bits in 64", EXACT),
    "groups of 128": (lambda: coded(65, 1280, 4, 128, zeros=8.0), "4 bits in 128", EXACT),
    "a scale a row": (lambda: coded(16, 1024, 4, 1024, zeros=8.0), "4 bits in 128", EXACT),
    "3 bits": (lambda: coded(16, 256, 3, 64, zeros=4.0), "4 bits in 64", EXACT),
    "8 bits": (lambda: coded(16, 256, 8, 128), "int8 in 128", ROUNDED),
    "8 bits with a sign": (lambda: coded(16, 256, 8, 32, zeros=128.0), "int8 in 32", EXACT),
    "int8": (lambda: coded(16, 100, 8, 100, zeros=128.0), "int8 by rows", EXACT),
    "FP8": (lambda: e4m3(16, 100, 100), "FP8 by rows", EXACT),
    "FP8 in blocks": (lambda: e4m3(16, 300, 128), "FP8 in 128", EXACT),
    "MXFP4": (lambda: coded(16, 64, 4, 32, zeros=0.0, levels=E2M1), "int8 in 32", EXACT),
}


def assert_is(packed, weight, tolerance):
    expected = torch.from_numpy(weight.dequantize())
    error = (packed.dense(torch.float32) - expected).abs().max()
    assert error <= tolerance * expected.abs().max()  # and no NaN


@pytest.mark.parametrize("type", BLOCKS, ids=lambda type: type.name)
def test_blocks_of_gguf(type):
    format, bits, tolerance = BLOCKS[type]
    weight = stored(type, 24, 512)
    packed = pack([weight], "cpu", torch.float32)
    assert packed.format == format and packed.shape == weight.shape
    assert packed.nbytes * 8 == bits * 24 * 512
    assert_is(packed, weight, tolerance)


@pytest.mark.parametrize("name", CODED)
def test_codes_of_checkpoints(name):
    make, format, tolerance = CODED[name]
    packed = pack([make()], "cpu", torch.float32)
    assert packed.format == format
    assert_is(packed, make(), tolerance)


@pytest.mark.parametrize(
    "weight",
    [
        coded(4, 64, 4, 64, levels=NF4_LEVELS, zeros=0.0),
        coded(4, 64, 8, 64, levels=np.nan_to_num(E5M2, posinf=1.0, neginf=1.0), zeros=0.0),
        coded(4, 64, 4, 4),
        scattered(coded(4, 64, 4, 32), np.arange(64) % 2),
    ],
    ids=["NF4", "E5M2", "short groups", "scattered"],
)
def test_what_no_kernel_reads_is_expanded_and_said(weight):
    packed = pack([weight], "cpu", torch.bfloat16)
    assert isinstance(packed, DenseWeight) and packed.format == "bfloat16"
    assert_is(packed, weight, 2.0**-8)
    floats = pack([stored(GGMLType.F16, 24, 512)], "cpu", torch.float32)
    assert expanded({"a": packed, "b": floats}) == {"a": ("x", 4 * 64 * 2)}


def test_scales_that_float16_cannot_hold_are_expanded():
    weight = stored(GGMLType.Q8_0, 2, 64)
    weight.data[1, 34:36] = np.array([np.inf], np.float16).view(np.uint8)
    packed = pack([weight], "cpu", torch.float32)
    assert expanded({"w": packed}) == {"w": ("Q8_0", 2 * 64 * 4)}
    assert torch.equal(packed.dense(torch.float32), torch.from_numpy(weight.dequantize()))


def test_weights_of_one_form_become_one():
    parts = [stored(GGMLType.Q4_K, n, 512, seed=n) for n in (8, 24, 8)]
    packed = pack(parts, "cpu", torch.float32)
    assert isinstance(packed, W4Weight) and packed.shape == (40, 512)
    each = [pack([part], "cpu", torch.float32).dense(torch.float32) for part in parts]
    assert torch.equal(packed.dense(torch.float32), torch.cat(each))


def test_weights_of_several_forms_stay_several():
    types = GGMLType.Q4_K, GGMLType.Q4_1, GGMLType.Q6_K, GGMLType.F16
    parts = [stored(type, 24, 512) for type in types]
    packed = pack(parts, "cpu", torch.float32)
    assert isinstance(packed, JoinedWeight)
    assert [part.shape[0] for part in packed.parts] == [48, 24, 24]
    assert packed.format == "4 bits in 32, int8 in 16, float32" and packed.shape == (96, 512)
    expected = np.concatenate([part.dequantize() for part in parts])
    assert torch.allclose(packed.dense(torch.float32), torch.from_numpy(expected), atol=1e-2)


def test_weights_of_several_forms_become_floats_where_they_must_be_one():
    weights = [coded(8, 256, 4, 32), stored(GGMLType.Q8_0, 4, 256)]
    made = pack(weights, "cpu", torch.float32, as_one=True)
    assert isinstance(made, DenseWeight) and len(made.expanded) == 2
    assert torch.equal(made.values, pack(weights, "cpu", torch.float32, as_floats=True).values)
    assert isinstance(pack(weights[:1] * 2, "cpu", torch.float32, as_one=True), W4Weight)


def test_weights_for_rounded_activations_are_not_joined_with_others():
    others, rounded = CODED["FP8"][0](), rounding(CODED["FP8"][0]())
    packed = pack([others, rounded, rounded.narrow(0, 8)], "cpu", torch.float32)
    assert [(part.shape[0], part.rounds_activations) for part in packed.parts] == [
        (16, False),
        (24, True),
    ]
    assert packed.parts[1].narrow(0, 8).rounds_activations
    in_blocks = [CODED["FP8 in blocks"][0](), rounding(CODED["FP8 in blocks"][0]())]
    assert pack(in_blocks, "cpu", torch.float32).format == "FP8 in 128"


@pytest.mark.parametrize(
    "make",
    [lambda: stored(GGMLType.Q4_K, 24, 512), CODED["8 bits"][0], CODED["FP8"][0]],
    ids=["Q4_K", "8 bits", "FP8"],
)
def test_pieces_are_the_whole(make, monkeypatch):
    at_once = pack([make(), make()], "cpu", torch.float32)
    monkeypatch.setattr(packing, "_PIECE_VALUES", 5 * make().shape[1])
    assert torch.equal(
        pack([make(), make()], "cpu", torch.float32).dense(torch.float32),
        at_once.dense(torch.float32),
    )


@pytest.mark.parametrize("type", [GGMLType.BF16, GGMLType.Q6_K])
def test_bytes_of_a_file_go_to_the_device_once_and_as_they_are(type, monkeypatch):
    sent = []
    monkeypatch.setattr(packing, "_PIECE_VALUES", 8 * 512)

    def upload(piece):
        assert piece.dtype == torch.uint8
        sent.append(piece.nbytes)
        return piece

    weight = stored(type, 24, 512)
    pack([weight], "cpu", torch.bfloat16, upload)
    assert sent == [weight.nbytes // 3] * 3


@given(n=st.integers(1, 40), groups=st.integers(1, 12), data=st.data())
def test_words_have_every_code_in_its_place(n, groups, data):
    weight = coded(n, 32 * groups, 4, 32, zeros=8.0, seed=data.draw(st.integers(0, 99)))
    packed = pack([weight], "cpu", torch.float32)
    row, column = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 32 * groups - 1))
    word = packed.words[column // TILE_K * 16 + column % 16, row].item()
    assert word >> 4 * (column % TILE_K // 16) & 15 == weight.codes.values[row, column]
    assert_is(packed, weight, EXACT)


@pytest.mark.parametrize("start", [0, 16])
def test_some_rows_are_a_view(start):
    for make in (lambda: stored(GGMLType.Q4_K, 24, 512), lambda: stored(GGMLType.Q5_K, 24, 512)):
        packed = pack([make()], "cpu", torch.float32)
        assert isinstance(packed, W4Weight | W8Weight)
        part = packed.narrow(start, start + 8)
        assert torch.equal(
            part.dense(torch.float32), packed.dense(torch.float32)[start : start + 8]
        )
        assert part.scales.data_ptr() == packed.scales.data_ptr() + 2 * start


def test_plain_products_are_those_of_double_precision():
    weight = pack([stored(GGMLType.Q4_K, 24, 512)], "cpu", torch.float32)
    x, bias = torch.randn(5, 512), torch.randn(24)
    norm = RowNorm(torch.rand(512), 1e-5)
    out = torch.randn(5, 12)
    PlainProducts().linear(x, weight, out, GemmFusion(norm, bias, "silu"))
    wide = x.double()
    wide = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight
    gate, up = (wide @ weight.dense(torch.float64).T + bias).chunk(2, dim=1)
    assert torch.allclose(out.double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-4)
    before = out.clone()
    down = weight.narrow(0, 12)
    PlainProducts().linear(x, down, out, GemmFusion(accumulate=True))
    expected = before.double() + x.double() @ down.dense(torch.float64).T
    assert torch.allclose(out.double(), expected, atol=1e-4)
    rows = torch.empty(3, 512)
    PlainProducts().rows(weight, torch.tensor([3, 0, 3], dtype=torch.int32), rows)
    assert torch.equal(rows, weight.dense(torch.float32)[[3, 0, 3]])
