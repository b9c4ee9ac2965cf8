from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from octavo.base.errors import ConfigError, ModelError, ModelFileError
from octavo.cost.catalogue import spec_of
from octavo.cost.open_spec import open_spec
from octavo.cost.weights import num_parameters


def test_a_folder_its_config_and_the_catalogue_are_opened_alike(tiny_model):
    folder, config = open_spec(tiny_model), open_spec(str(tiny_model / "config.json"))
    assert folder.layers == config.layers
    assert folder.source == tiny_model
    assert config.source is None
    assert open_spec("qwen3-32b").name == "qwen3-32b"


def test_a_file_of_ggufs_has_the_shape_of_its_model(smollm2_gguf):
    found, listed = open_spec(smollm2_gguf), spec_of("smollm2-135m")
    assert found.layers == listed.layers
    assert found.tie_embeddings
    assert num_parameters(found) == num_parameters(listed) == 134_515_008


def test_a_model_that_is_here_is_taken_as_it_is_stored(tiny_model, monkeypatch):
    here = SimpleNamespace(path=tiny_model)
    monkeypatch.setattr("octavo.hub.store.find", {"smollm2-135m": here}.get)
    assert open_spec("smollm2-135m").source == tiny_model
    assert open_spec("llama-3.1-8b").source is None


@pytest.mark.parametrize("text", ["./nowhere", "/no/such/folder", "missing.gguf", "config.json"])
def test_a_path_that_is_not_there_is_no_name(text):
    with pytest.raises(ConfigError, match="no such file"):
        open_spec(text)


def test_a_name_that_nobody_has_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match="qwen3-32b"):
        open_spec("qwen3-31b")


@pytest.mark.parametrize("text", ["[]", "{", "\x00", '{"model_type": 3}', "{}"])
def test_damaged_configs_are_model_errors(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError):
        open_spec(path)
    with pytest.raises(ModelError):
        open_spec(tmp_path)


def test_a_folder_without_a_config_is_an_error(tmp_path):
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_spec(tmp_path)


def test_every_number_of_a_config_is_checked(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    for name in config:
        for wrong in (0, -1, "many", 1.5, 10**12):
            path = tmp_path / "config.json"
            path.write_text(json.dumps({**config, name: wrong}))
            with pytest.raises(ModelError):
                open_spec(path)
