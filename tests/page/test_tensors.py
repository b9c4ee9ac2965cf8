"""Weights for the picture of quantization: what the file holds, in whatever format."""

from __future__ import annotations

import json
from base64 import b64decode

import numpy as np
import pytest
import quantized
import torch
from safetensors.torch import save_file

from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_writer import TensorToWrite, write_gguf
from octavo.page import tensors
from octavo.page.tensors import tensor_slice, tensor_table
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_formats import dequantize
from octavo.quantization.gguf_quantize import quantize_to_blocks


def values_of(found):
    flat = np.frombuffer(b64decode(found["float32"]), "<f4")
    return flat.reshape(found["rows"], found["columns"])


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of floats; what its config says of the model is not looked at."""
    values = {
        "matrix": torch.arange(40 * 800).reshape(40, 800).bfloat16(),
        "vector": torch.arange(300.0),
        "experts": torch.arange(3 * 10 * 256.0).reshape(3, 10, 256),
        "small": torch.ones(2, 5),
    }
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, values


@pytest.mark.parametrize(
    "name, down, across, row, column",
    [
        ("matrix", 0, 0, 0, 0),
        ("matrix", 1, 1, 32, 512),  # the end of its last row is no whole piece
        ("matrix", 0.5, 0.4, 16, 256),
        ("vector", 1, 0, 0, 0),
        ("experts", 1, 0, 22, 0),
        ("experts", 0.3, 0, 7, 0),  # of two experts
        ("small", 1, 1, 0, 0),
    ],
)
def test_a_slice_is_what_the_file_holds(folder, name, down, across, row, column):
    path, values = folder
    found = tensor_slice(open_checkpoint(path), name, down, across)
    assert (found["row"], found["column"], found["is_quantized"]) == (row, column, False)
    assert tuple(found["shape"]) == values[name].shape
    rows = values[name].float().reshape(-1, values[name].shape[-1])
    np.testing.assert_array_equal(values_of(found), rows[row : row + 8, column : column + 256])


def test_quantized_weights_are_told_as_what_they_are(tmp_path):
    rows = torch.randn(24, 512, generator=torch.Generator().manual_seed(1))
    blocks = quantize_to_blocks(GGMLType.Q4_K, rows)
    written = TensorToWrite("blk.0.weight", (24, 512), GGMLType.Q4_K, [blocks.numpy()])
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, [written])
    found = tensor_slice(open_checkpoint(tmp_path / "m.gguf"), "blk.0.weight", 1, 1)
    assert (found["format"], found["is_quantized"]) == ("Q4_K", True)
    expected = dequantize(GGMLType.Q4_K, blocks)[16:, 256:]
    np.testing.assert_array_equal(values_of(found), expected)


def test_a_weight_of_several_tensors(tmp_path):
    packed = quantized.gptq(np.random.default_rng(0), 32, 64)
    parts = {f"model.up_proj.{part}": tensor for part, tensor in packed.tensors.items()}
    save_file(parts, tmp_path / "model.safetensors")
    method = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": method}))
    checkpoint = open_checkpoint(tmp_path)
    (entry,) = tensor_table(checkpoint)["tensors"]
    assert (entry["name"], entry["shape"], entry["format"]) == (
        *("model.up_proj.weight", None, "gptq"),
    )
    found = tensor_slice(checkpoint, entry["name"], 0, 0)
    np.testing.assert_allclose(values_of(found), packed.values[:8], rtol=1e-6)


def test_the_table_is_bounded(folder, monkeypatch):
    path, values = folder
    table = tensor_table(open_checkpoint(path))
    assert {entry["name"]: tuple(entry["shape"]) for entry in table["tensors"]} == {
        name: tuple(each.shape) for name, each in values.items()
    }
    monkeypatch.setattr(tensors, "MAX_TENSORS", 3)
    table = tensor_table(open_checkpoint(path))
    assert (len(table["tensors"]), table["num_left_out"]) == (3, 1)
