"""Sizes that are only planned, against those of a loaded library."""

from __future__ import annotations

import ctypes

import pytest

from octavo.kernels.cpu import abi, layout
from octavo.kernels.cpu.library import load, runnable
from octavo.quantization.ggml_types import GGMLType

pytestmark = pytest.mark.skipif(not runnable(), reason="no native library was built")
SIZES = [1, 7, 8, 15, 16, 17, 31, 32, 33, 48, 127, 128, 129, 255, 576, 1536, 49152]


@pytest.mark.parametrize("format", layout.ARITHMETIC)
def test_packed_weights(format):
    lib = load().lib
    if format in layout.INTEGER_FORMATS:
        groups = layout.INTEGER_FORMATS[format].groups
    else:
        groups = layout.CODE_FORMATS.get(format, (0, 0))[1:]
    for group in groups:
        for n in SIZES:
            for k in SIZES:
                expected = lib.oct_packed_bytes(format, n, k, group)
                assert layout.packed_bytes(format, n, k, group) == expected, (n, k, group)


def test_what_becomes_of_the_types_of_files():
    lib, found = load().lib, {}
    for type in GGMLType:
        format, group = ctypes.c_int32(), ctypes.c_int32()
        if lib.oct_gguf_format(type, ctypes.byref(format), ctypes.byref(group)) == abi.OCT_OK:
            found[type] = (format.value, group.value)
    # MXFP4 is read as codes with scales, and packed as these.
    assert found | {GGMLType.MXFP4: (abi.OCT_W4F, 32)} == layout.PACKED_FORMATS
    assert GGMLType.MXFP4 not in found


@pytest.mark.parametrize(("name", "format"), layout.KV_FORMATS.items())
def test_keys_and_values(name, format):
    for head_dim in range(16, 257, 16):
        expected = load().lib.oct_kv_chunk_bytes(format, head_dim)
        assert layout.KV_CHUNK * layout.kv_token_bytes(name, head_dim) == expected


@pytest.mark.parametrize("dtype", sorted(layout.KV_FORMATS.keys() & layout.LATENT_TYPES.keys()))
def test_latents(dtype):
    format = layout.KV_FORMATS[dtype]
    for rank, rope_dim in ((512, 64), (256, 32), (27, 6)):
        expected = load().lib.oct_latent_row_bytes(format, rank, rope_dim)
        assert layout.latent_row_bytes(dtype, rank, rope_dim) == expected


@pytest.mark.parametrize("sizes", [(1024, 352, 6), (4096, 14336, 2), (100, 40, 1), (1 << 20, 9, 8)])
def test_rows_of_experts(sizes):
    for tokens in (0, 1, 100, 1 << 20):
        assert layout.experts_bytes(*sizes, tokens) == load().lib.oct_experts_bytes(*sizes, tokens)
