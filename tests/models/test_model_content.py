"""The fingerprint of a model: what changes it, by which part, and what does not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.base.errors import ModelFileError
from octavo.models.gguf import GGUFFile
from octavo.models.model_content import change_times, fingerprint

SETTINGS, TABLES, WEIGHTS = (
    f"digest of the model's {part}" for part in ("settings", "tables", "weights")
)


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "elsewhere"))


def differing(one: Path, other: Path) -> set[str]:
    here, there = fingerprint(one), fingerprint(other)
    assert here.keys() == there.keys() == {SETTINGS, TABLES, WEIGHTS}
    return {name for name in here if here[name] != there[name]}


def test_neither_places_nor_times_nor_other_files_matter(tiny_model, copy):
    (copy / "README.md").write_text("other words")
    (copy / ".octavo").mkdir(exist_ok=True)
    (copy / "model.safetensors").touch()
    assert not differing(tiny_model, copy)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_settings_and_tokenizer_count_whole(tiny_model, copy, name):
    file = copy / name
    file.write_text((file.read_text() if file.exists() else "") + " ")
    assert differing(tiny_model, copy) == {SETTINGS}


def test_a_byte_of_every_tensor_is_found(tiny_model, copy):
    """Each is shorter than a page here, or has a first and a last one."""
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    tensors = json.loads(whole[8:begin])
    tensors.pop("__metadata__", None)
    for name, tensor in tensors.items():
        for at in (tensor["data_offsets"][0], tensor["data_offsets"][1] - 1):
            data = bytearray(whole)
            data[begin + at] ^= 1
            weights.write_bytes(data)
            assert differing(tiny_model, copy) == {WEIGHTS}, name


def test_names_shapes_and_types_are_found(tiny_model, copy):
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name, value in tensors.items() if value.ndim == 2)
    for changed in (
        {**tensors, "another": tensors[name]},
        {**tensors, name: tensors[name].T.copy()},
        {**tensors, name: tensors[name].astype(np.float16)},
    ):
        save_file(changed, weights)
        assert TABLES in differing(tiny_model, copy)


def test_of_long_tensors_a_piece_of_each_four_mib_counts(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    values = np.zeros(12 << 20, dtype=np.uint8)
    for folder in folders:
        folder.mkdir()
        save_file({"long": values}, folder / "model.safetensors")
        values[(8 << 20) + 1000] = 1
    assert differing(*folders) == {WEIGHTS}


def test_a_gguf_file_by_its_metadata_and_by_its_tensors(smollm2_gguf, tmp_path):
    copy = tmp_path / "another-name.gguf"
    shutil.copyfile(smollm2_gguf, copy)
    assert not differing(smollm2_gguf, copy)
    with GGUFFile(copy) as file:
        tensor = min(file.tensors.values(), key=lambda each: each.num_bytes)
        whole = copy.read_bytes()
    for at, part in ((tensor.offset, WEIGHTS), (whole.index(b"Instruct"), TABLES)):
        data = bytearray(whole)
        data[at] ^= 1
        copy.write_bytes(data)
        assert differing(smollm2_gguf, copy) == {part}


def test_damaged_weights_are_an_error(copy):
    (copy / "model.safetensors").write_bytes(b"no table")
    with pytest.raises(ModelFileError, match="not a sound safetensors file"):
        fingerprint(copy)


def test_a_change_in_place_is_seen_by_its_time(copy):
    before = change_times(copy)
    assert change_times(copy) == before
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert change_times(copy) == {**before, "model.safetensors": 1}
