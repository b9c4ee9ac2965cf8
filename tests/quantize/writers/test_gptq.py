"""GPTQ files: octavo reads back what was written, and so do those who read them in other ways."""

from __future__ import annotations

import numpy as np
import pytest
from made_weights import assert_same, random_integers, read, write
from quantized import stream

from octavo.base.errors import ConfigError
from octavo.quantize.grid import Scheme
from octavo.quantize.writers.gptq import GPTQWriter

BITS = (2, 3, 4, 8)
# What GPTQModel adds to the words of zeros of version 1.
WORDS_OF_ONES = {
    2: [0x55555555],
    3: [0x24924924, 0x92492492, 0x49249249],
    4: [0x11111111],
    8: [0x01010101],
}


def values_of(words, bits, count):
    """Of one row of words: what ``stream`` has packed."""
    number = sum(int(word) << (32 * i) for i, word in enumerate(words))
    return np.array([number >> (bits * i) & (2**bits - 1) for i in range(count)])


def zeros_as_read_by_gptqmodel(qzeros, bits, count, is_version_1):
    """It adds to whole words, and then takes values out of them."""
    words = qzeros.view("<u4")
    if is_version_1:
        words = words + np.resize(np.array(WORDS_OF_ONES[bits], np.uint32), words.shape[1])
    return np.array([values_of(row, bits, count) for row in words])


def zeros_as_read_by_autogptq(qzeros, bits, count):
    """It takes values out of words, and then adds; without what is carried out of a value."""
    return np.array([values_of(row, bits, count) for row in qzeros.view("<u4")]) + 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, "channel"])
def test_round_trip(bits, symmetric, group_size, tmp_path):
    scheme = Scheme(bits, group_size, symmetric)
    weight = random_integers(96, 128, scheme)
    write(tmp_path, GPTQWriter(), weight, scheme)
    assert_same(weight, read(tmp_path))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_others_read_the_same_zeros(bits, symmetric):
    scheme, writer = Scheme(bits, 32, symmetric), GPTQWriter()
    weight = random_integers(64, 96, scheme)
    is_version_1 = writer.config(scheme, [])["checkpoint_format"] == "gptq"
    qzeros = writer.parts(weight, scheme)["qzeros"].data
    read_by_gptqmodel = zeros_as_read_by_gptqmodel(qzeros, bits, 64, is_version_1)
    np.testing.assert_array_equal(read_by_gptqmodel, weight.zeros.T)
    if is_version_1:
        read_by_autogptq = zeros_as_read_by_autogptq(qzeros, bits, 64)
        np.testing.assert_array_equal(read_by_autogptq, weight.zeros.T)


def test_version_1_wherever_all_agree_about_it():
    """Some know no other: vLLM, of symmetric weights of 4 and 8 bits."""
    layouts = {
        (bits, symmetric): GPTQWriter().config(Scheme(bits, 32, symmetric), [])["checkpoint_format"]
        for bits in BITS
        for symmetric in (True, False)
    }
    assert {key for key, layout in layouts.items() if layout == "gptq"} == {
        (2, True),
        (4, True),
        (8, True),
    }
    assert set(layouts.values()) == {"gptq", "gptq_v2"}


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_streams_of_columns(bits):
    scheme = Scheme(bits, 32)
    weight = random_integers(32, 64, scheme)
    parts = GPTQWriter().parts(weight, scheme)
    codes = weight.codes.rows(0, 32)
    assert parts["qweight"].data.view("<u4")[:, 5].tolist() == stream(codes[5], bits)
    assert parts["g_idx"].data.tolist() == [0] * 32 + [1] * 32
    assert {name: part.dtype for name, part in parts.items()} == {
        "qweight": "I32",
        "qzeros": "I32",
        "scales": "F16",
        "g_idx": "I32",
    }


@pytest.mark.parametrize(
    "shape, bits, what",
    [
        ((32, 32), 5, "5 bits"),
        ((40, 32), 4, "its 40 outputs are no multiple of 32"),
        ((32, 48), 4, "its 48 inputs are no multiple of 32"),
    ],
)
def test_what_has_no_room(shape, bits, what):
    with pytest.raises(ConfigError, match=what):
        GPTQWriter().check(shape, Scheme(bits, 16))
