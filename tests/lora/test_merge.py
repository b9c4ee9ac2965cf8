from __future__ import annotations

import json

import numpy as np
import pytest
from made_adapters import PROJECTIONS, linear_modules, merged_by_hand, write_adapter
from safetensors.numpy import load_file

from octavo.base.errors import ConfigError, ModelFileError
from octavo.cli import main
from octavo.lora.merge import merge_adapter
from octavo.lora.peft_folder import PeftFolder
from octavo.models.checkpoint import open_checkpoint
from octavo.quantization.ggml_types import GGMLType


@pytest.mark.parametrize("name", ["llama-tied", "phi3", "gpt2"])
def test_merged_weights_are_those_of_a_merge_by_hand(name, tiny_hf, tmp_path):
    model = tiny_hf(name)
    adapter = write_adapter(tmp_path / "a", model, modules=linear_modules(model), rank=3)
    expected = load_file(merged_by_hand(tmp_path / "hand", model, adapter) / "model.safetensors")
    merge_adapter(open_checkpoint(model), PeftFolder(adapter), tmp_path / "out", GGMLType.F32)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_allclose(merged[tensor], values, atol=2e-6, err_msg=tensor)


def test_a_tied_head_stays_tied_unless_it_changes(tiny_model, tmp_path):
    adapter = write_adapter(tmp_path / "a", tiny_model)
    merge_adapter(open_checkpoint(tiny_model), PeftFolder(adapter), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"]
    for index, changed in enumerate(({"head": True}, {"names": ("embed_tokens",)})):
        adapter = write_adapter(tmp_path / f"a{index}", tiny_model, **changed)
        merge_adapter(open_checkpoint(tiny_model), PeftFolder(adapter), tmp_path / f"{index}")
        config = json.loads((tmp_path / f"{index}" / "config.json").read_text())
        assert not config["tie_word_embeddings"]


def test_an_adapter_of_another_model_is_refused(tiny_hf, tiny_model, tmp_path):
    adapter = write_adapter(tmp_path / "a", tiny_hf("llama"), names=PROJECTIONS)
    with pytest.raises(ModelFileError, match="the model's weight"):
        merge_adapter(open_checkpoint(tiny_model), PeftFolder(adapter), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_merges_and_says_so(tiny_model, tmp_path, capsys):
    adapter = write_adapter(tmp_path / "a", tiny_model)
    out = str(tmp_path / "out")
    assert main(["lora", "merge", str(tiny_model), str(adapter), out, "--dtype", "bfloat16"]) == 0
    assert "14 modules merged, weights of BF16" in capsys.readouterr().out
    assert main(["lora", "merge", str(tiny_model), str(adapter), out]) == 1
    assert "not overwritten" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        merge_adapter(open_checkpoint(tiny_model), PeftFolder(adapter), out)
