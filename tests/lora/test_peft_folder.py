"""Folders of adapters, of PEFT's kind and of all kinds that nobody should trust."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from made_adapters import write_adapter
from safetensors.numpy import load_file, save_file

from octavo.base.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.lora.peft_folder import PeftFolder, digest_of

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tiny_model, tmp_path):
    return write_adapter(tmp_path / "adapter", tiny_model, rank=4, names=("q_proj", "down_proj"))


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


def scales(folder):
    return {change.module: change.scale for change in PeftFolder(folder).changes()}


def test_modules_and_scales(adapter):
    folder = PeftFolder(adapter)
    assert folder.modules == [
        f"model.layers.{layer}.{module}"
        for layer in (0, 1)
        for module in ("mlp.down_proj", "self_attn.q_proj")
    ]
    assert set(scales(adapter).values()) == {2.0}  # alpha 8, rank 4


def test_rslora_scales_by_the_root_of_the_rank(adapter):
    change_config(adapter, use_rslora=True, lora_alpha=6)
    assert set(scales(adapter).values()) == {6 / math.sqrt(4)}


def test_patterns_name_modules_by_their_ends(tiny_model, tmp_path):
    folder = write_adapter(
        tmp_path / "a",
        tiny_model,
        rank=4,
        names=("q_proj", "down_proj"),
        rank_pattern={"q_proj": 2},
        alpha_pattern={"down_proj": 32, "^model.layers.1.self_attn.q_proj": 5},
    )
    found = scales(folder)
    assert found["model.layers.0.mlp.down_proj"] == 32 / 4
    assert found["model.layers.0.self_attn.q_proj"] == 8 / 2
    assert found["model.layers.1.self_attn.q_proj"] == 5 / 2


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|down)_proj", None])
def test_target_modules_that_are_no_list(targets, adapter):
    change_config(adapter, target_modules=targets)
    assert len(PeftFolder(adapter).modules) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_type", "LOHA"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("alora_invocation_tokens", [5]),
        ("init_lora_weights", "pissa_niter_4"),
        ("rank_pattern", {"(a+)+$": 4}),
    ],
)
def test_what_octavo_does_not_have_is_refused_by_name(name, value, adapter):
    change_config(adapter, **{name: value})
    with pytest.raises(UnsupportedModelError, match=name):
        PeftFolder(adapter)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", 0),
        ("r", 10**9),
        ("r", "4"),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("lora_alpha", -1),
        ("use_rslora", "yes"),
        ("rank_pattern", {"q_proj": -1}),
        ("rank_pattern", [4]),
        ("target_modules", [4]),
        ("target_modules", ["q_proj", "k_proj"]),
        ("a_setting_of_tomorrow", 3),
    ],
)
def test_a_config_that_makes_no_sense_is_an_error_that_names_the_key(name, value, adapter):
    change_config(adapter, **{name: value})
    with pytest.raises(ModelFileError, match=name):
        PeftFolder(adapter)


def remove(name):
    return lambda tensors: tensors.pop(name)


def put(name, values):
    return lambda tensors: tensors.update({name: values})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (remove(f"{Q}.lora_A.weight"), "lora_A that belongs to it is missing"),
        (remove(f"{Q}.lora_B.weight"), "lora_B that belongs to it is missing"),
        (put(f"{Q}.lora_A.weight", np.zeros((3, 48), np.float32)), "the rank is 3"),
        (put(f"{Q}.lora_A.weight", np.zeros((0, 48), np.float32)), "a matrix is needed"),
        (put(f"{Q}.lora_A.weight", np.zeros(48, np.float32)), "a matrix is needed"),
        (put(f"{Q}.lora_A.weight", np.zeros((300, 400), np.float32)), "ranks above 256"),
        (put(f"{Q}.lora_A.weight", np.full((4, 48), np.nan, np.float32)), "NaN or infinite"),
        (put(f"{Q}.lora_B.weight", np.full((96, 4), np.inf, np.float32)), "NaN or infinite"),
        (put(f"{Q}.lora_A.weight", np.zeros((4, 48), np.int8)), "tensors of I8"),
        (put(f"{Q}.lora_magnitude_vector", np.zeros(96, np.float32)), "DoRA"),
        (put("base_model.model.lm_head.weight", np.zeros((2, 2), np.float32)), "trained whole"),
        (put(f"{Q}.lora_A.default.weight", np.zeros((4, 48), np.float32)), "a second A"),
        (put("x.lora_A.weight", np.zeros((4, 48), np.float32)), "no name of a matrix"),
    ],
)
def test_tensors_that_make_no_sense_are_an_error_that_names_them(change, reason, adapter):
    change_tensors(adapter, change)
    with pytest.raises(ModelFileError, match=reason):
        list(PeftFolder(adapter).changes())


def test_files_that_are_missing_or_damaged(adapter, tmp_path):
    with pytest.raises(ModelNotFoundError):
        PeftFolder(tmp_path / "nowhere")
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError, match="sound safetensors"):
        PeftFolder(adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelFileError, match="can run code"):
        PeftFolder(adapter)
    (adapter / "adapter_config.json").write_text("[")
    with pytest.raises(ModelFileError):
        PeftFolder(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ModelFileError, match="no adapter of PEFT"):
        PeftFolder(adapter)


def test_links_out_of_the_folder_are_not_followed(adapter, tmp_path):
    weights = adapter / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ModelFileError, match="leads out of the folder"):
        PeftFolder(adapter)


def test_the_digest_is_of_the_content(adapter, tiny_model, tmp_path):
    same = write_adapter(tmp_path / "b", tiny_model, rank=4, names=("q_proj", "down_proj"))
    other = write_adapter(tmp_path / "c", tiny_model, rank=4, seed=1)
    assert digest_of(adapter) == digest_of(same) != digest_of(other)
    change_config(same, lora_alpha=9)
    assert digest_of(adapter) != digest_of(same)
