"""The models of a server: those that were named, and those of a folder."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError
from octavo.server.registry.entries import models_in
from octavo.server.registry.set_up import RegistrySetUp
from octavo.server.requested_model import RequestedModel
from octavo.server.settings import ServerSettings
from octavo.settings.engine import EngineArgs


def set_up(*models: RequestedModel, **settings) -> list[str]:
    """The names of all models, the budget being that of ``settings``."""
    made = RegistrySetUp(
        models,
        EngineArgs,
        ServerSettings(**{"model_memory": "1GiB", **settings}),
        lambda name: None,
    )
    _, served = made.create()
    return [name for status in served.registry.list() for name in status.names]


def requested(path: Path, **more) -> RequestedModel:
    return RequestedModel(EngineArgs(str(path)), **more)


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    """A folder with two models, a part of a third, and other things."""
    for name in ("one", "two"):
        (tmp_path / "models" / name).mkdir(parents=True)
        shutil.copy(tiny_model / "config.json", tmp_path / "models" / name)
    models = tmp_path / "models"
    (models / "split-00001-of-00002.gguf").write_bytes(b"GGUF....")
    (models / "split-00002-of-00002.gguf").write_bytes(b"GGUF....")
    (models / "text.gguf").write_text("no model")
    (models / "empty").mkdir()
    return models


def test_a_folder_has_the_models_that_are_in_it(folder):
    assert [name for name, _ in models_in(folder)] == ["one", "split", "two"]
    assert set_up(model_dir=str(folder)) == ["one", "split", "two"]


def test_models_that_octavo_has_fetched_are_called_what_they_were_fetched_by(tmp_path, monkeypatch):
    from octavo.hub import store

    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "a.gguf").write_bytes(b"GGUF....")
    file = store.StoredFile("a.gguf", 8)
    store.publish(staged, "org/a", entry="a.gguf", files=(file,), license=None, source="test")
    (name, path), *others = models_in(tmp_path / "models")
    assert (name, path.name, others) == ("org/a", "a.gguf", [])


def test_those_that_were_named_come_first_and_names_are_their_own(folder):
    named = requested(folder / "two"), requested(folder / "one", names=("first", "1"))
    assert set_up(*named, model_dir=str(folder)) == ["two", "first", "1", "one", "split"]


def test_a_folder_is_looked_at_again(folder):
    made = RegistrySetUp([], EngineArgs, ServerSettings(model_dir=str(folder)), lambda name: None)
    _, served = made.create()
    (folder / "two" / "config.json").unlink()
    (folder / "empty" / "config.json").write_text("{}")

    asyncio.run(served.registry.rescan())
    assert [status.names[0] for status in served.registry.list()] == ["one", "split", "empty"]


@pytest.mark.parametrize(
    ("named", "settings", "words"),
    [
        (("one", "one"), {}, "both called one"),
        (("one", "two"), {"served_model_name": ("x",)}, "served_model_name is for one"),
        (("one",), {"served_model_name": ("*",)}, "accepts any name"),
        (("one", "two"), {"pin": ("three",)}, "pin three: there is no such model among one, two"),
        (("one", "two"), {"router": "round_robin"}, "router is for the replicas of one"),
        ((), {"model_dir": "/nowhere"}, "model_dir /nowhere: No such file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(folder, named, settings, words):
    with pytest.raises(ConfigError, match=words):
        set_up(*(requested(folder / name) for name in named), **settings)


def test_replicas_and_empty_folders_are_refused(folder):
    two = RequestedModel(EngineArgs(str(folder / "one"), data_parallel_size=2))
    with pytest.raises(ConfigError, match="each has one engine"):
        set_up(two, requested(folder / "two"))
    with pytest.raises(ConfigError, match="has no models"):
        set_up(model_dir=str(folder / "empty"))
