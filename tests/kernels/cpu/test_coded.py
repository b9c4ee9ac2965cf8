"""Codes with scales in packed formats: which one, and that nothing is lost that need not be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coded_weights import coded, scattered

from octavo.base.errors import UnsupportedModelError
from octavo.kernels.cpu import abi, packing
from octavo.kernels.cpu.packed_weights import PackedWeights, lay_out, pack_all
from octavo.quantization.levels import E2M1, E4M3, FP4_LEVELS, NF4_LEVELS

LINE = np.linspace(-1, 1, 16, dtype=np.float32)


EXACT = {
    "4 bits around 8": (coded(20, 192, 4, 64, 8.0), abi.OCT_W4S, 64),
    "4 bits around 7": (coded(20, 192, 4, 64, 7.0), abi.OCT_W5S, 32),
    "3 bits": (coded(20, 192, 3, 32, 4.0), abi.OCT_W3S, 32),
    "2 bits": (coded(20, 192, 2, 64, 2.0), abi.OCT_W2S, 64),
    "2 bits, from 0 on": (coded(20, 256, 2, 128, 0.0), abi.OCT_W3S, 128),
    "a group of three": (coded(20, 192, 4, 96, 8.0), abi.OCT_W4S, 32),
    "8 bits, a row": (coded(20, 200, 8, 200, 128.0), abi.OCT_W8S, 32),
    "6 bits": (coded(20, 128, 6, 64, 32.0), abi.OCT_W8S, 64),
    "MXFP4": (coded(20, 64, 4, 32, 0.0, E2M1), abi.OCT_W4F, 32),
    "NVFP4": (coded(20, 80, 4, 16, 0.0, E2M1), abi.OCT_W4F, 16),
}


@pytest.mark.parametrize(("weight", "format", "group"), EXACT.values(), ids=EXACT)
def test_integers_around_a_zero_stay_what_they_are(native, weight, format, group):
    packed = packing.pack(weight, native.library, native.pool)
    assert (packed.spec.format, packed.spec.group) == (format, group)
    assert np.array_equal(packed.unpack(native.library, native.pool), weight.dequantize())


CODES = {
    "NF4": (coded(20, 192, 4, 64, 0.0, NF4_LEVELS), abi.OCT_NF4),
    "NF4, longer blocks": (coded(20, 192, 4, 128, 0.0, NF4_LEVELS), abi.OCT_NF4),
    "FP4 of bitsandbytes": (coded(20, 192, 4, 64, 0.0, FP4_LEVELS), abi.OCT_FP4),
    "FP8, a row": (coded(20, 200, 8, 200, 0.0, E4M3), abi.OCT_E4M3),
    "FP8, blocks": (coded(20, 200, 8, 128, 0.0, E4M3), abi.OCT_E4M3),
}


@pytest.mark.parametrize(("weight", "format"), CODES.values(), ids=CODES)
def test_codes_of_floats_stay_what_they_are(native, weight, format):
    nan = np.isnan(weight.dequantize())
    weight.codes.values[nan] = 0
    weight = replace(weight, scales=weight.scales * np.float32(1.01))  # no float16
    packed = packing.pack(weight, native.library, native.pool)
    assert packed.spec.format == format
    assert np.array_equal(packed.unpack(native.library, native.pool), weight.dequantize())


def test_codes_of_nan_are_refused(native):
    weight = coded(20, 128, 8, 128, 0.0, E4M3)
    weight.codes.values[3, 4] = 0xFF
    with pytest.raises(UnsupportedModelError, match="NaN"):
        packing.pack(weight, native.library, native.pool)


@pytest.mark.parametrize(
    ("bits", "format"),
    [
        *((2, abi.OCT_W2A), (3, abi.OCT_W3A), (4, abi.OCT_W4A)),
        *((5, abi.OCT_W5A), (6, abi.OCT_W8A), (8, abi.OCT_W8A)),
    ],
)
def test_other_zeros_are_rounded_to_float16(native, bits, format):
    weight = coded(20, 128, bits, 32)
    packed = packing.pack(weight, native.library, native.pool)
    assert packed.spec.format == format
    error = np.abs(packed.unpack(native.library, native.pool) - weight.dequantize())
    largest = np.repeat(weight.scales * weight.zeros, 32, axis=1)
    assert (error <= largest * 2.0**-11 + 1e-7).all()


UNLIKE = {
    "looked up": coded(20, 64, 4, 32, 0.0, LINE),
    "groups of 16": coded(20, 64, 4, 16, 8.0),
    "scattered, of 33 and 31": scattered(coded(20, 64, 4, 32, 8.0), np.arange(64) > 32),
}


@pytest.mark.parametrize("weight", UNLIKE.values(), ids=UNLIKE)
def test_all_others_are_floats(native, weight):
    packed = packing.pack(weight, native.library, native.pool)
    assert packed.spec.format == abi.OCT_F16
    found = packed.unpack(native.library, native.pool)
    assert np.array_equal(found, weight.dequantize().astype(np.float16).astype(np.float32))


SCATTERED = {
    "4 bits, symmetric": (coded(36, 192, 4, 64, 8.0), abi.OCT_W4S, 64),
    "3 bits, a shorter last group": (coded(36, 200, 3, 128, 4.0), abi.OCT_W3S, 128),
    "8 bits": (coded(36, 96, 8, 32, 128.0), abi.OCT_W8S, 32),
}


@pytest.mark.parametrize(("weight", "format", "group"), SCATTERED.values(), ids=SCATTERED)
def test_scattered_groups_are_packed_as_runs(native, weight, format, group):
    n, k = weight.shape
    order = np.random.default_rng(1).permutation(k)
    weight = scattered(weight, order // weight.group_size)
    packed = packing.pack(weight, native.library, native.pool)
    assert (packed.spec.format, packed.spec.group) == (format, group)
    assert packed.spec.num_bytes == packed.spec.columns_at + 4 * k
    columns = packed.spec.columns(packed.data)
    assert sorted(columns) == list(range(k)) and (np.diff(weight.groups[columns]) >= 0).all()
    assert np.array_equal(packed.unpack(native.library, native.pool), weight.dequantize())


TOO_MUCH = {
    "large": replace(coded(20, 64, 4, 32, 0.0, LINE), scales=np.full((20, 2), 1e5, np.float32)),
    "small": replace(coded(20, 64, 8, 64, 128.0), scales=np.full((20, 1), 1.3e-7, np.float32)),
}


@pytest.mark.parametrize("weight", TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_float16_has_no_room_for(native, weight):
    packed = packing.pack(weight, native.library, native.pool)
    assert packed.spec.format == abi.OCT_F32
    assert np.array_equal(packed.unpack(native.library, native.pool), weight.dequantize())


def test_a_scale_far_below_those_of_its_row_may_be_rounded(native):
    weight = coded(20, 80, 4, 16, 0.0, E2M1)
    weight.scales[3, 2] = 1e-7
    packed = packing.pack(weight, native.library, native.pool)
    assert packed.spec.format == abi.OCT_W4F
    values = weight.dequantize()
    error = np.abs(packed.unpack(native.library, native.pool) - values)
    assert 0 < error.max() <= 2.0**-16 * np.abs(values[3]).max()
    weight.scales[3] = 1e-7
    assert packing.packed_format(weight, native.library).format == abi.OCT_F16


@pytest.mark.parametrize("groups", [None, np.arange(64) % 2], ids=["runs", "scattered"])
def test_pieces_of_a_weight_are_packed_as_the_whole(native, monkeypatch, groups):
    """Of which some have one zero, for which alone another format would be chosen."""
    weight = coded(64, 64, 4, 32)
    weight.zeros[:32] = 8.0
    if groups is not None:
        weight = scattered(weight, groups)
    monkeypatch.setattr("octavo.kernels.cpu.packed_weights._PIECE_BYTES", 16 * 64)
    entries, size = lay_out({"w": weight}, native.library)
    memory = packing.aligned(size)
    pack_all({"w": weight}, entries, memory, native.library, native.pool, None)
    whole = packing.pack(weight, native.library, native.pool)
    assert PackedWeights(memory, entries).num_bytes == whole.nbytes
    assert np.array_equal(memory[: whole.nbytes], whole.data)
