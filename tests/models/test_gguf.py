"""The GGUF reader: as the ``gguf`` package on good files, nothing but ModelFileError on bad."""

from __future__ import annotations

import os
import random
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFValueType as V
from gguf.constants import GGML_QUANT_SIZES
from pace import python_seconds

from octavo.base.errors import ModelFileError
from octavo.models import gguf as reader
from octavo.models.gguf import GGUFFile
from octavo.quantization.ggml_types import GGMLType

SCALARS: dict[V, Any] = {
    V.UINT8: 255,
    V.INT8: -128,
    V.UINT16: 65535,
    V.INT16: -32768,
    V.UINT32: 2**32 - 1,
    V.INT32: -(2**31),
    V.FLOAT32: 0.1,
    V.BOOL: True,
    V.STRING: "größe 🙂\n\0",
    V.UINT64: 2**64 - 1,
    V.INT64: -(2**63),
    V.FLOAT64: 0.1,
}


# -- building files byte by byte, also bad ones ----------------------------------------------------


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + u32(kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return u32(kind) + u64(count) + items


def tensor(
    name: str | bytes = "t", dims: tuple[int, ...] = (4,), type: int = 0, offset: int = 0
) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(type) + u64(offset)


def build(
    *tensors: bytes,
    entries: tuple[bytes, ...] = (),
    data: int = 64,
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    """A file with ``data`` bytes of tensor data behind the padding."""
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if num_tensors is None else num_tensors)
    head += u64(len(entries) if num_entries is None else num_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


ENTRIES = 24  # where the metadata starts, or the tensor table of a file without metadata
KEY = ENTRIES + len(string("key"))  # ... and the value type of an entry called "key"


@pytest.fixture
def save(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


Save = Callable[[bytes], Path]


def write_sample(path: Path, alignment: int = 32) -> dict[str, np.ndarray]:
    """A file of the gguf package: all types of metadata, and tensors of several types."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for kind, value in SCALARS.items():
        writer.add_key_value(f"scalar.{kind.name.lower()}", value, kind)
        items = [value] * 3 if kind in (V.STRING, V.FLOAT32, V.FLOAT64) else [value, 0, 1]
        writer.add_key_value(f"array.{kind.name.lower()}", items, V.ARRAY, sub_type=kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "", "Ġthe", "\u2581x", "<|im_end|>"])
    tensors = {}
    rng = np.random.default_rng(0)
    for number, (name, shape) in enumerate(
        [
            ("F32", (5,)),
            ("Q4_1", (3, 64)),
            ("Q8_0", (2, 2, 32)),
            ("Q6_K", (1, 256)),
            ("F16", (7, 3)),
        ]
    ):
        values, size = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // values * size), dtype=np.uint8)
        tensors[f"blk.{number}.weight"] = raw
        writer.add_tensor(f"blk.{number}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    write_sample(path)
    content = path.read_bytes()
    assert len(content) < 8192
    return content


# -- good files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_files_of_the_gguf_package(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "sample.gguf"
    tensors = write_sample(path, alignment)
    with GGUFFile(path) as file:
        assert (file.path, file.version, file.alignment) == (path, 3, alignment)
        assert file.metadata["general.architecture"] == "llama"
        for kind, value in SCALARS.items():
            stored = np.float32(value).item() if kind == V.FLOAT32 else value
            scalar = file.metadata[f"scalar.{kind.name.lower()}"]
            assert scalar == stored and type(scalar) is type(value)
            items = file.metadata[f"array.{kind.name.lower()}"]
            assert items[0] == stored and len(items) == 3
            assert isinstance(items, list if kind == V.STRING else np.ndarray)
        assert file.metadata["array.bool"].dtype == np.bool_
        assert file.metadata["array.int8"].dtype == np.int8
        assert file.metadata["tokenizer.ggml.tokens"][3:] == ["Ġthe", "\u2581x", "<|im_end|>"]
        assert list(file.tensors) == list(tensors)
        for name, raw in tensors.items():
            info = file.tensors[name]
            assert info.name == name and info.offset % alignment == 0
            assert info.num_bytes == raw.nbytes
            np.testing.assert_array_equal(
                file.data(name), raw.reshape(info.num_rows, raw.shape[-1])
            )
        assert file.tensors["blk.0.weight"].shape == (5,)
        assert file.tensors["blk.1.weight"].shape == (3, 64)
        assert file.tensors["blk.1.weight"].type is GGMLType.Q4_1
        assert file.tensors["blk.2.weight"].shape == (2, 2, 32)


def test_all_tensor_types(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for type in GGMLType:
        ggml_type = gguf.GGMLQuantizationType(type)
        size = GGML_QUANT_SIZES[ggml_type][1]
        data = np.full((2, 3 * size), int(type), np.uint8)
        writer.add_tensor(type.name, data, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert [file.tensors[type.name].type for type in GGMLType] == list(GGMLType)
        for type in GGMLType:
            values, size = GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type)]
            assert file.tensors[type.name].shape == (2, 3 * values)
            data = file.data(type.name)
            assert data.shape == (2, 3 * size) and (data == int(type)).all()


def test_version_2_and_empty_things(save: Save) -> None:
    entries = (entry("s", 8, string("")), entry("l", 9, array(8, 0)), entry("n", 9, array(10, 0)))
    with GGUFFile(save(build(entries=entries, version=2, data=0))) as file:
        assert file.version == 2 and file.tensors == {}
        assert file.metadata["s"] == "" and file.metadata["l"] == []
        assert file.metadata["n"].shape == (0,) and file.metadata["n"].dtype == np.uint64
    with GGUFFile(save(b"GGUF" + u32(3) + u64(0) + u64(1) + entry("n", 9, array(10, 0)))) as file:
        assert len(file.metadata["n"]) == 0  # at the very end of the file


def test_data_becomes_a_tensor_without_copy_or_warning(save: Save) -> None:
    path = save(build(tensor(dims=(2, 3)), data=24))
    with GGUFFile(path) as file:
        data = file.data("t")
        values = torch.from_numpy(data)  # pytest turns a warning into an error
        assert values.data_ptr() == data.ctypes.data
        assert values.view(torch.float32).shape == (3, 2)
        values.fill_(255)
        assert path.read_bytes()[-24:] == bytes(24), "a private view never changes the file"


def test_close(save: Save) -> None:
    file = GGUFFile(save(build(tensor())))
    data = file.data("t")
    file.close()
    assert data.sum() == 0, "arrays outlive close()"
    del data
    file.close()
    file.close()
    assert file.tensors["t"].shape == (4,)
    with pytest.raises(ValueError):
        file.data("t")


def test_tensors_may_be_in_any_order_with_gaps(save: Save) -> None:
    content = build(tensor("b", offset=96), tensor("a", offset=0), data=112)
    with GGUFFile(save(content)) as file:
        assert list(file.tensors) == ["b", "a"]
        assert file.data("b").shape == (1, 16)


def test_strings_that_are_not_utf8_stay_apart_and_can_be_encoded(save: Save) -> None:
    raw = [b"\xe2", b"\xe2\x96", b"\xff", b"\xfe", "é".encode(), b"\xed\xa0\x80"]
    items = b"".join(map(string, raw))
    entries = (entry("l", 9, array(8, len(raw), items)), entry("s", 8, string(b"a\x80b")))
    with GGUFFile(save(build(entries=entries))) as file:
        tokens = file.metadata["l"]
        assert tokens[:5] == ["\\xe2", "\\xe2\\x96", "\\xff", "\\xfe", "é"]
        assert len(set(tokens)) == len(raw) and all(token.encode() for token in tokens)
        assert file.metadata["s"] == "a\\x80b"


def test_unknown_tensor_name(save: Save) -> None:
    with GGUFFile(save(build(tensor()))) as file, pytest.raises(ModelFileError, match="no such"):
        file.data("lm_head.weight")


# -- bad files -------------------------------------------------------------------------------------


def one(kind: int, value: bytes, key: str | bytes = "key") -> bytes:
    """A file with one metadata entry."""
    return build(entries=(entry(key, kind, value),))


def aligned(value: int, kind: int = 4) -> bytes:
    return one(kind, u32(value) if kind == 4 else u64(value), "general.alignment")


ALIGNMENT = ENTRIES + len(string("general.alignment")) + 4
RANK = ENTRIES + len(string("t"))  # of the first tensor: the number of its dimensions,
DIMS = RANK + 4  # then these,
TYPE = DIMS + 8  # then, if it is one, its type
OFFSET = TYPE + 4  # and offset
HUGE = 2**64 - 1
TRUNCATED = "truncated or damaged; download it again"
UNPADDED = b"GGUF" + u32(3) + u64(0) + u64(1)  # one metadata entry follows

BAD: dict[str, tuple[bytes, str | None, int, str]] = {
    # name: (content, field, offset, part of the reason)
    "empty file": (b"", None, 0, "empty"),
    "other magic": (b"GGML" + bytes(60), "magic", 0, "begins with b'GGML'"),
    "web page": (b"<!DOCTYPE html><html>", "magic", 0, "web page"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "magic", 0, "git lfs pull"),
    "zip archive": (b"PK\x03\x04" + bytes(60), "magic", 0, "zip"),
    "ggjt": (b"tjgg" + bytes(60), "magic", 0, "GGML file of 2023"),
    "three bytes": (b"GGU", "magic", 0, TRUNCATED),
    "version 0": (build(version=0), "version", 4, "2 and 3, not 0"),
    "version 1": (build(version=1), "version", 4, "version 1 is obsolete"),
    "version 4": (build(version=4), "version", 4, "a newer octavo"),
    "big-endian": (build(version=3 << 24), "version", 4, "big-endian"),
    "no counts": (b"GGUF" + u32(3), "tensor count", 8, TRUNCATED),
    "tensor count": (build(num_tensors=HUGE), "tensor count", 8, "more than 65536"),
    "metadata count": (build(num_entries=2**63), "metadata count", 16, "more than 65536"),
    "one entry too few": (
        build(num_entries=1, data=0)[:24],
        "metadata entry 0 key",
        ENTRIES,
        "needs a file of 32 bytes, but it has 24: it is " + TRUNCATED,
    ),
    # metadata keys
    "empty key": (one(4, u32(1), ""), "metadata entry 0 key", ENTRIES, "empty"),
    "huge key": (UNPADDED + u64(2**63) + b"key", "metadata entry 0 key", ENTRIES, "too long"),
    "long key": (one(4, u32(1), "k" * 70000), "metadata entry 0 key", ENTRIES, "65536 are allowed"),
    "key over the end": (UNPADDED + u64(9), "metadata entry 0 key", ENTRIES + 8, TRUNCATED),
    "key not UTF-8": (one(4, u32(1), b"a\xff"), "metadata entry 0 key", ENTRIES + 9, "not UTF-8"),
    "key twice": (
        build(entries=(entry("key", 0, b"1"), entry("key", 0, b"2"))),
        "metadata entry 1 key",
        KEY + 5,
        "'key' is there twice",
    ),
    # metadata values
    "value type 13": (one(13, u32(0)), "'key' value type", KEY, "13 is no type"),
    "value type -1": (one(2**32 - 1, u32(0)), "'key' value type", KEY, "4294967295"),
    "value type missing": (UNPADDED + string("key"), "'key' value type", KEY, TRUNCATED),
    "value missing": (UNPADDED + entry("key", 10, b"1234"), "'key' value", KEY + 4, TRUNCATED),
    "bool 2": (one(7, b"\2"), "'key' value", KEY + 4, "a bool is 0 or 1, not 2"),
    "string of 2^63": (one(8, u64(2**63)), "'key' value", KEY + 4, "too long"),
    "string of -1": (one(8, u64(HUGE)), "'key' value", KEY + 4, "too long"),
    "string over the end": (one(8, u64(1 << 20)), "'key' value", KEY + 12, TRUNCATED),
    # arrays
    "array type 99": (one(9, array(99, 0)), "'key' array type", KEY + 4, "99 is no type"),
    "nested arrays": (
        one(9, array(9, 1, array(9, 1, array(9, 1)))),
        "'key' array type",
        KEY + 4,
        "no arrays of arrays",
    ),
    "array of 2^62 u32": (one(9, array(4, 2**62)), "'key' array length", KEY + 16, TRUNCATED),
    "array of -1 u8": (one(9, array(0, HUGE)), "'key' array length", KEY + 16, TRUNCATED),
    "array over the end": (one(9, array(12, 50)), "'key' array length", KEY + 16, TRUNCATED),
    "array of 2^61 strings": (one(9, array(8, 2**61)), "'key' array length", KEY + 8, TRUNCATED),
    "bool 7 in an array": (one(9, array(7, 3, b"\0\1\7")), "'key' value", KEY + 18, "not 7"),
    "huge string in an array": (
        one(9, array(8, 1, u64(HUGE))),
        "'key' string 0",
        KEY + 16,
        "too long",
    ),
    "string over the end in an array": (
        one(9, array(8, 2, string("a") + u64(1000))),
        "'key' string 1",
        KEY + 33,
        TRUNCATED,
    ),
    "strings end early": (
        UNPADDED + entry("key", 9, array(8, 2, string("123456789"))),
        "'key' string 1",
        KEY + 33,
        TRUNCATED,
    ),
    # general.alignment
    "alignment 0": (aligned(0), "'general.alignment' value", ALIGNMENT, "power of two"),
    "alignment 1": (aligned(1), "'general.alignment' value", ALIGNMENT, "not 1"),
    "alignment 48": (aligned(48), "'general.alignment' value", ALIGNMENT, "power of two"),
    "alignment 2^31": (aligned(2**31), "'general.alignment' value", ALIGNMENT, "to 1048576"),
    "alignment 2^63": (aligned(2**63, 10), "'general.alignment' value", ALIGNMENT, "to 1048576"),
    "alignment text": (
        one(8, string("32"), "general.alignment"),
        "'general.alignment' value",
        ALIGNMENT,
        "power of two",
    ),
    # tensors
    "empty name": (build(tensor("")), "tensor 0 name", ENTRIES, "empty"),
    "huge name": (build(u64(2**31)), "tensor 0 name", ENTRIES, "too long"),
    "name not UTF-8": (build(tensor(b"\xc3")), "tensor 0 name", ENTRIES + 8, "not UTF-8"),
    "name twice": (
        build(tensor(offset=0), tensor(offset=32)),
        "tensor 1 name",
        OFFSET + 8,
        "'t' is there twice",
    ),
    "no dimensions": (build(tensor(dims=())), "'t' number of dimensions", RANK, "1 to 4, not 0"),
    "five dimensions": (
        build(tensor(dims=(1,) * 5)),
        "'t' number of dimensions",
        RANK,
        "1 to 4, not 5",
    ),
    "2^31 dimensions": (
        build(string("t") + u32(2**31)),
        "'t' number of dimensions",
        RANK,
        "1 to 4",
    ),
    "dimension 0": (build(tensor(dims=(4, 0))), "'t' dimensions", DIMS + 8, "none may be 0"),
    "dimensions missing": (
        build(string("t") + u32(4), data=0)[: DIMS + 12],
        "'t' dimensions",
        DIMS + 8,
        TRUNCATED,
    ),
    "half a block": (
        build(tensor(dims=(48,), type=3)),
        "'t' dimensions",
        DIMS,
        "32 values, not 48",
    ),
    "withdrawn type": (build(tensor(type=4)), "'t' type", TYPE, "no tensor type 4"),
    "unknown type": (build(tensor(type=9999)), "'t' type", TYPE, "no tensor type 9999"),
    "type -1": (build(tensor(type=2**32 - 1)), "'t' type", TYPE, "4294967295"),
    "product of 2^64": (
        build(tensor(dims=(2**32, 2**32))),
        "'t' data",
        DIMS + 20,
        TRUNCATED,
    ),
    "product of 2^256": (build(tensor(dims=(HUGE,) * 4)), "'t' data", DIMS + 36, TRUNCATED),
    "size that padding wraps to 0": (
        build(tensor(dims=(HUGE,), type=24)),
        "'t' data",
        OFFSET,
        TRUNCATED,
    ),
    "offset over the end": (build(tensor(offset=64)), "'t' data", OFFSET, TRUNCATED),
    "end that wraps": (build(tensor(offset=2**64 - 32)), "'t' data", OFFSET, TRUNCATED),
    "misaligned offset": (
        build(tensor(offset=4)),
        "'t' offset",
        OFFSET,
        "not a multiple of the alignment, 32",
    ),
    "data cut": (build(tensor())[:-49], "'t' data", OFFSET, TRUNCATED),
    "overlap": (
        build(tensor("u", (9,), offset=0), tensor("v", (1,), offset=32)),
        "'v' offset",
        2 * OFFSET + 8 - ENTRIES,
        "overlaps that of 'u'",
    ),
    "same place": (
        build(tensor("u"), tensor("v")),
        "'v' offset",
        2 * OFFSET + 8 - ENTRIES,
        "overlaps that of 'u'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(save: Save, case: str) -> None:
    content, field, offset, reason = BAD[case]
    path = save(content)
    with pytest.raises(ModelFileError) as info:
        GGUFFile(path)
    error = info.value
    assert (error.field, error.offset) == (field, offset)
    assert reason in error.reason
    assert str(error).startswith(f"{path} at byte {offset}") and len(str(error)) < 1000


def test_names_are_shortened_and_escaped_in_messages(save: Save) -> None:
    with pytest.raises(ModelFileError) as info:
        GGUFFile(save(one(13, b"", "evil\n\x1b[31m" + "x" * 60000)))
    assert len(str(info.value)) < 400 and "\n" not in str(info.value)


def test_not_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, reason in [
        (tmp_path, "a folder"),
        (tmp_path / "missing.gguf", "cannot be opened: No such file"),
        (tmp_path / "nul\0.gguf", "cannot be opened"),
    ]:
        with pytest.raises(ModelFileError, match=reason):
            GGUFFile(path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ModelFileError, match="a device or pipe"):
            GGUFFile(tmp_path / "pipe")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "private.gguf").write_bytes(build())
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match="cannot be opened: Permission denied"):
        GGUFFile(str(tmp_path / "private.gguf"))


def test_big_endian_file_of_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="big-endian"):
        GGUFFile(tmp_path / "big.gguf")


def test_file_that_shrinks_after_it_was_opened(save: Save) -> None:
    path = save(build(tensor(dims=(4096,)), data=4 * 4096))
    with GGUFFile(path) as file:
        os.truncate(path, 8192)
        with pytest.raises(ModelFileError, match="truncated after it was opened") as info:
            file.data("t")
        assert info.value.offset == file.tensors["t"].offset


# -- every damage ----------------------------------------------------------------------------------


def check_open(path: Path, seconds: list[float]) -> bool:
    """Whether the file loads; asserts that it does, or raises the right error, in bounds, and adds
    how long that took."""
    tracemalloc.reset_peak()
    before, start = tracemalloc.get_traced_memory()[0], time.process_time()
    try:
        with GGUFFile(path) as file:
            for name, info in file.tensors.items():
                data = file.data(name)
                assert data.nbytes == info.num_bytes and data.shape[0] == info.num_rows
                int(data.sum())  # every byte can be touched
                del data
        valid = True
    except ModelFileError as error:
        assert error.offset is not None and error.reason
        assert 0 <= error.offset <= path.stat().st_size
        valid = False
    seconds.append(time.process_time() - start)
    assert tracemalloc.get_traced_memory()[1] - before < 2 << 20
    return valid


@pytest.fixture
def seconds() -> Iterator[list[float]]:
    """What opening files takes, while memory is traced: none takes long."""
    found: list[float] = []
    tracemalloc.start()
    try:
        yield found
        assert max(found) < python_seconds(1e7)
    finally:
        tracemalloc.stop()


def test_every_prefix(save: Save, sample: bytes, seconds: list[float]) -> None:
    path = save(sample)
    with GGUFFile(path) as file:
        end = max(info.offset + info.num_bytes for info in file.tensors.values())
    for length in range(len(sample), -1, -1):
        os.truncate(path, length)
        assert check_open(path, seconds) == (length >= end), f"prefix of {length} bytes"


def mutate(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        # The header is a small part of most files, but where damage matters.
        at = rng.randrange(min(len(damaged), rng.choice((32, 1500, len(damaged)))) or 1)
        kind = rng.randrange(7)
        if kind == 0 and damaged:
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            damaged[at : at + 1] = rng.choice((b"\0", b"\xff", b"\x80", rng.randbytes(1)))
        elif kind == 2:
            del damaged[at:]
        elif kind == 3:
            del damaged[at : at + rng.choice((1, 4, 8, rng.randrange(100)))]
        elif kind == 4:
            damaged[at:at] = damaged[at : at + rng.randrange(1, 100)]
        else:
            value = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 32, 2**64 - 1))
            width = rng.choice((4, 8))
            number = (value % 256**width).to_bytes(width, "little")
            damaged[at : at + (width if kind == 5 else 0)] = number
    return bytes(damaged)


def test_random_mutations(save: Save, sample: bytes, seconds: list[float]) -> None:
    valid = 0
    for seed in range(2000):
        content = mutate(sample, random.Random(seed))
        try:
            valid += check_open(save(content), seconds)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert 200 < valid < 1800, "the mutations are too weak, or too strong, to be a test"


# -- limits ----------------------------------------------------------------------------------------


def test_the_most_strings(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (entry("a", 9, array(8, 6, 6 * string("x"))), entry("b", 9, array(8, 5, bytes(40))))
    path = save(build(entries=entries))
    monkeypatch.setattr(reader, "MAX_STRINGS", 11)
    GGUFFile(path).close()
    monkeypatch.setattr(reader, "MAX_STRINGS", 10)
    with pytest.raises(ModelFileError, match="more than the 10 strings") as info:
        GGUFFile(path)
    assert info.value.field == "'b' array length"


def test_the_largest_header(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(one(8, string("x" * 1000)))
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", KEY + 4 + 8 + 1000)
    GGUFFile(path).close()
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", KEY + 4 + 8 + 999)
    with pytest.raises(ModelFileError, match="header is larger than"):
        GGUFFile(path)


def test_the_longest_string(save: Save) -> None:
    with GGUFFile(save(one(8, string(b"x" * (16 << 20))))) as file:
        assert len(file.metadata["key"]) == 16 << 20
    for content in (
        one(8, string(bytes((16 << 20) + 1))),
        one(9, array(8, 1, string(bytes((16 << 20) + 1)))),
    ):
        with pytest.raises(ModelFileError, match="16777216 are allowed"):
            GGUFFile(save(content))


def test_too_much_that_is_not_utf8(save: Save) -> None:
    for count, length in ((1, 1 << 18), (1 << 15, 8)):
        items = array(8, count, count * string(b"\xff" * length))
        GGUFFile(save(one(9, items))).close()
        more = entry("more", 8, string(b"\xff"))
        with pytest.raises(ModelFileError, match="not UTF-8") as info:
            GGUFFile(save(build(entries=(entry("key", 9, items), more))))
        assert info.value.field == "'more' value"


@pytest.mark.skipif(sys.platform != "linux", reason="how Linux counts memory")
def test_a_file_larger_than_memory(save: Save) -> None:
    size = 1 << 40
    path = save(build(tensor(dims=(size,), type=24), data=0))
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError:
        pytest.skip("the file system has no files of 1 TiB")
    with GGUFFile(path) as file:
        assert file.data("t")[0, -1] == 0


@pytest.mark.parametrize("hostile", ["strings", "wide strings", "tensors", "keys", "not UTF-8"])
def test_the_worst_files_take_bounded_time_and_memory(save: Save, hostile: str) -> None:
    if hostile == "strings":
        content = one(9, array(8, reader.MAX_STRINGS, reader.MAX_STRINGS * string("ab")))
    elif hostile == "wide strings":  # four bytes for each letter, because of the last
        count = reader.MAX_STRINGS
        length = (reader.MAX_HEADER_BYTES - 100) // count - 8
        content = one(9, array(8, count, count * string("x" * (length - 4) + "🙂")))
    elif hostile == "tensors":
        count = reader.MAX_ENTRIES
        table = (tensor(f"t{i}", (1, 1, 1, 1), 24, 8 * i) for i in range(count))
        alignment = entry("general.alignment", 4, u32(8))
        content = build(*table, entries=(alignment,), data=8 * count)
    elif hostile == "keys":
        content = build(entries=tuple(entry(f"k{i}", 9, array(0, 1, b"1")) for i in range(65536)))
    else:
        content = one(9, array(8, 1 << 18, (1 << 18) * string(b"\xff")))
    path = save(content)
    start = time.process_time()
    with GGUFFile(path) as file:
        assert time.process_time() - start < python_seconds(6e7)
        if hostile.endswith("strings"):
            tokens = file.metadata["key"]
            assert sys.getsizeof(tokens) + sum(map(sys.getsizeof, tokens)) < 256 << 20
