"""Files that are damaged, missing, or not what they seem."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.quantization.tensors import to_torch


@pytest.fixture
def folder(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
def sharded(folder):
    """The tiny model in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard_of = {}
    for part in (1, 2):
        shard = f"model-{part:05}-of-00002.safetensors"
        names = [name for i, name in enumerate(sorted(tensors)) if i % 2 == part - 1]
        save_file({name: tensors[name] for name in names}, folder / shard)
        shard_of |= dict.fromkeys(names, shard)
    write_index(folder, shard_of)
    return folder


def write_index(folder, shard_of):
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def refusal(path):
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(path)
    return caught.value


def test_tables_without_reading(folder):
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.tensors["model.norm.weight"]
    assert (entry.shape, entry.num_bytes) == ((48,), 192)
    assert entry.path == folder / "model.safetensors"
    assert checkpoint.read("model.norm.weight").shape == (48,)


def test_shards_are_one_table(sharded, tiny_model):
    checkpoint, whole = open_checkpoint(sharded), load_file(tiny_model / "model.safetensors")
    assert set(checkpoint.tensors) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(to_torch(checkpoint.read(name)), tensor)


def test_nothing_there(tmp_path):
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    assert "no model.safetensors" in refusal(tmp_path).reason


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unread(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    for path in (tmp_path, tmp_path / name):
        error = refusal(path)
        assert "safetensors" in error.reason and error.path.name == name


def test_other_files_are_refused(folder):
    assert "the folder" in refusal(folder / "model.safetensors").reason
    assert "neither" in refusal(folder / "config.json").reason
    (folder / "model.safetensors").rename(folder / "model.gguf")
    assert "model.gguf" in refusal(folder).reason


def test_config_is_needed_and_must_be_an_object(folder):
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelFileError, match="not a JSON object"):
        open_checkpoint(folder).config()
    for text in (b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000):
        (folder / "config.json").write_bytes(text)
        with pytest.raises(ModelFileError, match="not JSON|not UTF-8"):
            open_checkpoint(folder).config()
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        open_checkpoint(folder).config()


def test_a_hostile_config_runs_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "modeling_evil.py").write_text("open('pwned', 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    config["custom_pipelines"] = {"text-generation": {"impl": "modeling_evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    open_checkpoint(folder).config()
    assert not (folder / "pwned").exists()


# Shards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "..",
        "",
        "config.json",
        "a\0.safetensors",
        7,
    ],
)
def test_shards_must_be_plain_names(sharded, name):
    save_file({"x": torch.zeros(1)}, sharded.parent / "secret.safetensors")
    write_index(sharded, {**index_of(sharded), "x": name})
    assert "not the name of a safetensors file beside it" in refusal(sharded).reason


def test_links_must_not_lead_out(sharded):
    save_file({"x": torch.zeros(1)}, sharded.parent / "secret.safetensors")
    (sharded / "link.safetensors").symlink_to(sharded.parent / "secret.safetensors")
    write_index(sharded, {**index_of(sharded), "x": "link.safetensors"})
    assert "leads out of the folder" in refusal(sharded).reason


def test_links_of_a_hub_cache_are_followed(sharded, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / f"{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert len(open_checkpoint(snapshot).tensors) > 2


def test_shards_that_do_not_fit_their_index(sharded):
    shard_of = index_of(sharded)
    first, other = sorted(set(shard_of.values()))
    name = next(name for name, shard in shard_of.items() if shard == first)

    write_index(sharded, {**shard_of, name: other})
    assert refusal(sharded).field == name

    write_index(sharded, {**shard_of, "model.more": other})
    assert (refusal(sharded).field, "in no shard" in refusal(sharded).reason) == (
        "model.more",
        True,
    )

    write_index(sharded, {key: shard for key, shard in shard_of.items() if key != name})
    assert name in refusal(sharded).reason

    write_index(sharded, shard_of)
    tensors = load_file(sharded / other)
    save_file({**tensors, name: torch.zeros(1)}, sharded / other)
    assert refusal(sharded).field == name  # in two shards

    (sharded / other).unlink()
    assert f"{other} is missing" in refusal(sharded).reason


@pytest.mark.parametrize("shard_of", [{}, [], None, "x"])
def test_an_index_must_be_a_table(sharded, shard_of):
    write_index(sharded, shard_of)
    assert refusal(sharded).field == "weight_map"


# Safetensors --------------------------------------------------------------------------------------


def test_damaged_headers(folder):
    path = folder / "model.safetensors"
    good = path.read_bytes()
    size = struct.unpack("<Q", good[:8])[0]
    for bad in (
        b"",
        good[:7],
        good[: 8 + size // 2],
        good[:-1],
        good + b"\0",
        struct.pack("<Q", 1 << 60) + good[8:],
        struct.pack("<Q", size + 100) + good[8:],
        good[:8] + b"x" + good[9:],
        good[:8] + b"\xff" * size + good[8 + size :],
        good.replace(b"[260,48]", b"[260,99]", 1),
        good.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1),
    ):
        assert bad != good
        path.write_bytes(bad)
        assert refusal(folder).path == path


def test_every_prefix_and_many_mutations(folder):
    path = folder / "model.safetensors"
    good = path.read_bytes()
    header = 8 + struct.unpack("<Q", good[:8])[0]
    generator = torch.Generator().manual_seed(0)

    def pick(limit):
        return int(torch.randint(limit, (1,), generator=generator))

    refused = 0
    for step in range(600):
        if step < 200:
            bad = good[: pick(len(good))]
        else:
            bad = bytearray(good)
            for _ in range(1 + pick(3)):
                bad[pick(header)] = pick(256)
        path.write_bytes(bad)
        try:
            checkpoint = open_checkpoint(folder)
            for name in checkpoint.tensors:
                checkpoint.read(name)
        except ModelError:
            refused += 1
    assert refused > 300


def test_other_dtypes_are_named(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": torch.zeros(48, dtype=torch.int8)}, path)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight.*I8"):
        open_checkpoint(folder)


# Split GGUF files ---------------------------------------------------------------------------------


def test_parts_of_a_split_file(tmp_path):
    import gguf
    import numpy as np

    def write(part, count, name):
        path = tmp_path / f"m-{part:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor(name, np.full(32, part, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    first, second = write(1, 2, "a"), write(2, 2, "b")
    checkpoint = open_checkpoint(first)
    assert {name: entry.path for name, entry in checkpoint.tensors.items()} == {
        "a": first,
        "b": second,
    }
    assert checkpoint.read("b").floats().tolist() == [2.0] * 32
    assert "give the first" in refusal(second).reason
    write(2, 2, "a")
    assert refusal(first).field == "a"
    second.unlink()
    assert "m-00002-of-00002.gguf" in refusal(first).reason
