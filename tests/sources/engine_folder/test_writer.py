"""What `octavo build` makes is whole, or not there."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError, MissingPackageError, ModelError
from octavo.base.model_files import ENGINE_MANIFEST
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder import writer
from octavo.sources.engine_folder.writer import build_engine_folder


def args(model: Path, **settings) -> EngineArgs:
    return EngineArgs.from_kwargs(str(model), **settings)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_made(tiny_model, tmp_path):
    out, seen = tmp_path / "deep" / "out", []
    built = build_engine_folder(args(tiny_model), out, progress=lambda *at: seen.append(at))
    assert names(out) == [
        *("constants.bin", "octavo.json", "tokenizer.json", "tokenizer_config.json"),
        "weights.packed",
    ]
    assert names(out.parent) == ["out"]
    assert built.num_bytes == sum(path.stat().st_size for path in out.iterdir())
    assert seen[-1][0] == seen[-1][1] > 0
    expected = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tiny_model.iterdir()
        if path.is_file()
    }
    assert built.sources == expected
    manifest = json.loads((out / ENGINE_MANIFEST).read_text())
    assert {name: each["sha256"] for name, each in manifest["sources"].items()} == expected
    assert manifest["settings"] == {} and manifest["source"] == str(tiny_model)


def test_the_same_model_makes_the_same_folder(tiny_model, tmp_path):
    for name in "ab":
        build_engine_folder(args(tiny_model), tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_the_models_folder_is_left_alone(tiny_model, tmp_path):
    before = names(tiny_model)
    build_engine_folder(args(tiny_model), tmp_path / "out")
    assert names(tiny_model) == before


def test_nothing_is_overwritten(tiny_model, tiny_engine, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(ConfigError, match=f"{name} is there already.*remove it"):
            build_engine_folder(args(tiny_model), tmp_path / name)
    with pytest.raises(ConfigError, match="is an engine folder already"):
        build_engine_folder(args(tiny_model), tiny_engine)
    assert (tmp_path / "file").read_text() == "mine" and names(tmp_path / "folder") == ["mine"]
    (tmp_path / "empty").mkdir()
    build_engine_folder(args(tiny_model), tmp_path / "empty")
    assert ENGINE_MANIFEST in names(tmp_path / "empty")


def test_an_engine_folder_is_no_source(tiny_engine, tmp_path):
    with pytest.raises(ConfigError, match="give the model it was built from"):
        build_engine_folder(args(tiny_engine), tmp_path / "out")
    assert names(tmp_path) == []


def test_what_a_folder_may_not_say_is_told_when_it_is_built(tiny_model, tmp_path, caplog):
    asked = {"max_num_seqs": 3, "spec_method": "ngram", "kv_offload": f"{tmp_path}/kv:1MiB"}
    build_engine_folder(args(tiny_model, **asked), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "octavo.json").read_text())
    assert manifest["settings"] == {"max_num_seqs": 3}
    assert "not kept in the folder" in caplog.text
    assert "--kv-offload, --spec-method" in caplog.text
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda"}, "device 'cuda'"),
        ({"kernels": "reference"}, "kernels 'reference'"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16'"),
        ({"quantization": "gguf"}, "not quantized"),
        ({"block_size": 24}, "block_size 24"),
        ({"max_model_len": 1000}, "256 positions"),
        ({"max_model_len": 256, "num_blocks": 2}, "num_blocks"),
    ],
)
def test_settings_that_no_start_could_use(tiny_model, tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        build_engine_folder(args(tiny_model, **settings), tmp_path / "out")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(28, "No space left")])
def test_what_ends_early_leaves_nothing(tiny_model, tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(writer, "write_manifest", fail)
    expected = ConfigError if isinstance(error, OSError) else error
    with pytest.raises(expected, match="No space left" if expected is ConfigError else None):
        build_engine_folder(args(tiny_model), tmp_path / "out")
    assert names(tmp_path) == []


def test_a_place_where_nothing_can_be_written(tiny_model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        build_engine_folder(args(tiny_model), tmp_path / "file" / "out")


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ModelError):
        build_engine_folder(args(tmp_path / "none.gguf"), tmp_path / "out")
    assert names(tmp_path) == []


def test_without_native_kernels(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "none")
    with pytest.raises(ConfigError, match="OCTAVO_ISA") as caught:
        build_engine_folder(args(tiny_model), tmp_path / "out")
    assert not isinstance(caught.value, MissingPackageError)
    assert os.listdir(tmp_path) == []
