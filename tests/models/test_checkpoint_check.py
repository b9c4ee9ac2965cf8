"""What is said of a checkpoint before it is loaded, and that loading agrees."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from loading import load_model
from safetensors.numpy import load_file, save_file

from octavo import cli
from octavo.base.errors import ModelError
from octavo.models.checkpoint_check import inspect_model


@pytest.fixture
def folder(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path / "model"


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def problems(folder):
    return [(problem.kind, problem.name) for problem in inspect_model(folder).problems]


def test_a_sound_model_has_no_problems(folder):
    report = inspect_model(folder)
    assert report.problems == () and report.architecture == "LlamaForCausalLM"
    tensors = load_file(folder / "model.safetensors").values()
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors)


def drop(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.0.mlp.router.weight"] = np.zeros((2, 48), np.float32)


def cut(tensors):
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (drop, ("missing", "model.layers.1.mlp.up_proj.weight")),
        (add, ("left over", "model.layers.0.mlp.router.weight")),
        (cut, ("shape", "model.layers.0.self_attn.k_proj.weight")),
    ],
)
def test_what_loading_would_stumble_over(folder, edit, expected):
    change(folder, edit)
    assert problems(folder) == [expected]
    with pytest.raises(ModelError, match=expected[1].removesuffix(".weight")):
        load_model(folder)


def test_rows_of_a_tensor_that_several_parameters_share(tiny_hf, tmp_path):
    shutil.copytree(tiny_hf("phi3"), tmp_path / "model")
    assert problems(tmp_path / "model") == []
    name = "model.layers.0.self_attn.qkv_proj.weight"
    for rows in (slice(None, -1), slice(None, 70)):

        def cut_rows(tensors, rows=rows):
            tensors[name] = np.ascontiguousarray(tensors[name][rows])

        change(tmp_path / "model", cut_rows)
        assert set(problems(tmp_path / "model")) == {("shape", name)}
        with pytest.raises(ModelError, match="qkv_proj"):
            load_model(tmp_path / "model")


def test_what_the_config_asks_for(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "xielu"}))
    assert problems(folder) == [("unreadable", "")]
    assert cli.main(["doctor", str(folder)]) == 1
    assert "the activation 'xielu' is not one of" in capsys.readouterr().out


def test_the_command(folder, capsys):
    assert cli.main(["doctor", str(folder)]) == 0
    assert "Problems\n  none" in capsys.readouterr().out
    change(folder, drop)
    assert cli.main(["doctor", str(folder), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["kind"] == "missing" and "no tensor" in problem["reason"]


def test_longrope_is_a_note_and_a_warning_at_the_start(tiny_hf, capsys, caplog):
    from octavo import LLM

    folder = str(tiny_hf("llama-longrope-long"))
    assert cli.main(["doctor", folder]) == 0
    printed = capsys.readouterr().out
    assert "Notes" in printed and "--max-model-len" in printed
    with LLM(folder, threads=1):
        pass
    assert "LongRoPE has two lists" in caplog.text
    caplog.clear()
    trained = printed.split("--max-model-len ")[1].split()[0]
    with LLM(folder, threads=1, max_model_len=int(trained)):
        pass
    assert "LongRoPE" not in caplog.text
