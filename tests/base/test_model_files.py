"""Nothing is read that a model's folder does not hold."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from octavo.base.errors import ModelFileError
from octavo.base.model_files import ModelFolder, split_parts
from octavo.models.checkpoint import open_checkpoint
from octavo.text.folder_tokenizer import load_folder_tokenizer

LEADS_OUT = "leads out of the folder"


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_files_by_name(folder):
    (folder / "a.json").write_text('{"a": "\\u00e9"}')
    files = ModelFolder(folder)
    assert files.find("a.json") == folder / "a.json" and files.find("b.json") is None
    assert files.read_json("a.json") == {"a": "é"} and files.read_json("b.json") is None
    assert files.read_text("a.json") == '{"a": "\\u00e9"}'


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a\0", "a//b", "x/../y"])
def test_names_that_are_paths(folder, name):
    with pytest.raises(ModelFileError, match="no name of a file"):
        ModelFolder(folder).find(name)


def test_links(folder, tmp_path):
    (folder / "file").write_text("x")
    (folder / "inside").symlink_to("file")
    assert ModelFolder(folder).read_text("inside") == "x"
    for target in ("../secret", tmp_path / "secret", "inside/../../secret"):
        (folder / "link").symlink_to(target)
        with pytest.raises(ModelFileError):
            ModelFolder(folder).find("link")
        (folder / "link").unlink()
    (folder / "first").symlink_to("second")
    (folder / "second").symlink_to("../secret")
    with pytest.raises(ModelFileError, match=LEADS_OUT):
        ModelFolder(folder).find("first")


def test_a_folder_inside_that_is_a_link(folder, tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "x.jinja").write_text("{{ secret }}")
    (folder / "more").symlink_to("../templates")
    with pytest.raises(ModelFileError, match=LEADS_OUT):
        list(ModelFolder(folder).find_all("more", "*.jinja"))


def test_what_is_no_file(folder):
    (folder / "broken").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    (folder / "directory").mkdir()
    os.mkfifo(folder / "pipe")  # reading it would never end
    for name in ("broken", "loop", "directory", "pipe"):
        with pytest.raises(ModelFileError, match="is no file|cannot be read"):
            ModelFolder(folder).read_text(name)


def test_a_folder_that_is_a_link_itself(folder, tmp_path):
    (folder / "a").write_text("x")
    (tmp_path / "alias").symlink_to(folder)
    assert ModelFolder(tmp_path / "alias").read_text("a") == "x"


def test_the_cache_of_hugging_face(tmp_path):
    """Its snapshots are of links to blobs, and to nothing else."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("x")
    (tmp_path / "models--a--b/refs").write_text("x")
    (snapshot / "a").symlink_to("../../blobs/1")
    (snapshot / "b").symlink_to("../../refs")
    assert ModelFolder(snapshot).read_text("a") == "x"
    with pytest.raises(ModelFileError, match=LEADS_OUT):
        ModelFolder(snapshot).find("b")
    (tmp_path / "alias").symlink_to(snapshot)
    assert ModelFolder(tmp_path / "alias").read_text("a") == "x"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"a": "\\ud800"}']
)
def test_what_is_no_json(folder, content):
    (folder / "a.json").write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        ModelFolder(folder).read_json("a.json")
    assert caught.value.path == folder / "a.json"


def test_files_that_are_too_large(folder):
    with open(folder / "a.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelFileError, match="allowed"):
        ModelFolder(folder).read_json("a.json")


def test_parts():
    assert split_parts("m.gguf") == ["m.gguf"]
    assert split_parts("m-00002-of-00002.gguf") == split_parts("m-00001-of-00002.gguf")
    assert split_parts("m-00001-of-00002.gguf")[1] == "m-00002-of-00002.gguf"
    for odd in ("m-00003-of-00002.gguf", "m-00000-of-00000.gguf", "m-1-of-2.gguf"):
        assert split_parts(odd) == [odd]


# -- every reader ---------------------------------------------------------------------------------

READ = {
    "model.safetensors": open_checkpoint,
    "model.safetensors.index.json": open_checkpoint,
    "config.json": lambda path: open_checkpoint(path).config(),
    "generation_config.json": lambda path: open_checkpoint(path).config(),
    "tokenizer.json": load_folder_tokenizer,
    "tokenizer_config.json": load_folder_tokenizer,
    "special_tokens_map.json": load_folder_tokenizer,
    "chat_template.jinja": load_folder_tokenizer,
    "additional_chat_templates/x.jinja": load_folder_tokenizer,
}


@pytest.mark.parametrize("name", READ)
def test_no_reader_follows_a_link_out_of_the_folder(name, folder, tiny_model):
    for file in filter(Path.is_file, tiny_model.iterdir()):
        (folder / file.name).write_bytes(file.read_bytes())
    outside = folder.parent / "outside"
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}")
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    path.symlink_to(outside)
    with pytest.raises(ModelFileError, match=LEADS_OUT):
        READ[name](folder)
    path.unlink()
    outside.rename(path)
    if not name.endswith("index.json"):
        READ[name](folder)


def test_parts_of_a_split_file_do_not_lead_out(folder):
    import gguf

    def write(path, name):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor(name, np.zeros(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    first, second = split_parts("m-00001-of-00002.gguf")
    write(folder / first, "a")
    write(folder.parent / second, "b")
    (folder / second).symlink_to(folder.parent / second)
    with pytest.raises(ModelFileError, match=LEADS_OUT):
        open_checkpoint(folder / first)
    # Links that a user made, to files that are together elsewhere, are that model.
    (folder / first).rename(folder.parent / first)
    (folder / first).symlink_to(folder.parent / first)
    assert len(open_checkpoint(folder / first).tensors) == 2
