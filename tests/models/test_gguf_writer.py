"""Files that were written, read again: by our reader and by the other implementation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.models.gguf import GGUFFile
from octavo.models.gguf_writer import TensorToWrite, write_gguf
from octavo.quantization.ggml_types import GGMLType

METADATA = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.number": 4_000_000_000,
    "a.negative": -5,
    "a.large number": 1 << 40,
    "a.float": 0.5,
    "texts": ["", "höher", "x" * 1000],
    "no texts": [],
    "floats": np.array([1.5, -2], np.float32),
    "doubles": np.array([1.5, -2]),
    "flags": np.array([True, False]),
    "types": np.array([1, 2, 6], np.int32),
}


def tensors() -> list[TensorToWrite]:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (6, 18), np.uint8)
    floats = rng.standard_normal(7).astype(np.float32)
    return [
        TensorToWrite("quantized", (3, 64), GGMLType.Q4_0, [blocks[:1], blocks[1:]]),
        TensorToWrite("floats", (7,), GGMLType.F32, [floats]),
        TensorToWrite("strided", (2, 2), GGMLType.F32, [np.ones((2, 4), np.float32)[:, ::2]]),
    ]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, METADATA, tensors())
    with GGUFFile(path) as file:
        assert file.metadata.keys() == METADATA.keys()
        for key, value in METADATA.items():
            np.testing.assert_array_equal(file.metadata[key], value)
        for tensor in tensors():
            read = file.tensors[tensor.name]
            assert (read.shape, read.type) == (tensor.shape, tensor.type)
            expected = b"".join(np.ascontiguousarray(chunk).tobytes() for chunk in tensor.chunks)
            assert file.data(tensor.name).tobytes() == expected


def test_another_implementation_reads_it(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, METADATA, tensors())
    reader = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        np.testing.assert_array_equal(reader.fields[key].contents(), value)
    for tensor, read in zip(tensors(), reader.tensors, strict=True):
        assert read.name == tensor.name and read.tensor_type == tensor.type
        assert tuple(reversed(read.shape)) == tensor.shape
        assert read.data.tobytes() == b"".join(chunk.tobytes() for chunk in tensor.chunks)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.lists(st.text(max_size=8)), max_size=4))
def test_any_text(tmp_path_factory, metadata):
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    write_gguf(path, metadata, [])
    with GGUFFile(path) as file:
        assert dict(file.metadata) == metadata


def test_a_tensor_that_is_too_short_leaves_no_file(tmp_path):
    short = TensorToWrite("x", (4, 64), GGMLType.Q4_0, [np.zeros(18, np.uint8)])
    with pytest.raises(ValueError, match="x has 18 bytes, not 144"):
        write_gguf(tmp_path / "model.gguf", {}, [short])
    assert not list(tmp_path.iterdir())
