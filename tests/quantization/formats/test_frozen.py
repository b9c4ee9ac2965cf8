"""Files that the libraries of each format wrote (`make_frozen.py`) are read as they read them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from octavo.models.quantized_hf import find_parts
from octavo.models.safetensors import SafetensorsFile
from octavo.quantization.base import StoredWeight
from octavo.quantization.coded import CodedWeight
from octavo.quantization.formats.registry import open_format
from octavo.quantization.formats.stored import StoredTensor

FROZEN = sorted(Path(__file__).with_name("frozen").glob("*.safetensors"))


def config_of(path):
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return json.loads(header["__metadata__"]["quantization_config"])


def read(path):
    """The weight of a frozen file, and the values that it should have."""
    file = SafetensorsFile(path)
    format = open_format(config_of(path), path)
    tensors = {name: file for name in file.tensors if name != "expected"}
    ((name, parts),) = find_parts(format, tensors).items()
    assert name == "m.weight" and set(parts.values()) == set(tensors)
    stored = {
        part: StoredTensor(*file.tensors[tensor], file.data(tensor), path, tensor)
        for part, tensor in parts.items()
    }
    expected = file.data("expected").view("<f4").reshape(file.tensors["expected"][1])
    return format.assemble(name, stored), expected


@pytest.mark.parametrize("path", FROZEN, ids=[path.stem for path in FROZEN])
def test_values_are_those_of_the_library(path):
    weight, expected = read(path)
    assert weight.shape == expected.shape
    if isinstance(weight, StoredWeight):
        values = weight.floats()
    else:
        values = weight.dequantize()
        assert np.array_equal(values[5:19], weight.dequantize(5, 19), equal_nan=True)
        assert 8 * weight.nbytes > weight.bits * values.size
    if path.stem == "bitsandbytes-int8":  # which multiplies by 1 / 127, rounded
        np.testing.assert_allclose(values, expected, rtol=2e-7)
    else:
        np.testing.assert_array_equal(values, expected)


def test_there_is_a_file_of_each_kind():
    writers = {path.stem.split("-")[0] for path in FROZEN}
    assert writers == {"autogptq", "gptqmodel", "autoawq", "compressed", "old", "bitsandbytes"}
    assert len(FROZEN) == 40


def test_blocks_that_span_rows_are_floats():
    kinds = {path.stem: type(read(path)[0]) for path in FROZEN if "bitsandbytes" in path.stem}
    assert kinds == {
        "bitsandbytes-fp4-64": CodedWeight,
        "bitsandbytes-fp4-nested-96": StoredWeight,
        "bitsandbytes-int8": CodedWeight,
        "bitsandbytes-nf4-96": StoredWeight,
        "bitsandbytes-nf4-nested-16": CodedWeight,  # four rows to a block
        "bitsandbytes-nf4-nested-64": CodedWeight,
    }


def test_inputs_in_act_order_have_groups_of_their_own():
    by_name = {path.stem: read(path)[0] for path in FROZEN if "nested-96" not in path.stem}
    assert by_name["autogptq-4bit-sym"].groups is None
    assert by_name["autogptq-4bit-sym"].zeros == 8.0
    for name in ("autogptq-4bit-act-order", "old-compressed-tensors-4bit"):
        assert by_name[name].groups.dtype == np.int32
        assert np.bincount(by_name[name].groups).tolist() == [32, 32, 32]
