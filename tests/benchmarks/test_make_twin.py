"""The twin answers as the original, and has other weights wherever something quantizes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_transformers import make_model
from transformers import AutoModelForCausalLM

from octavo.models.checkpoint import open_checkpoint
from octavo.models.parameters import Parameters
from octavo.quantization.ggml_types import GGMLType

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_twin.py"
PROMPT = torch.arange(3, 60)[None] * 37 % 199


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_twin", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits(model):
    with torch.no_grad():
        return model(PROMPT).logits[0]


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "qwen3", "gemma3"])
def test_the_same_function_of_other_weights(name, script, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")
    script.write_twin(tmp_path / "twin", tmp_path / "model", GGMLType.F32)
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", attn_implementation="eager")
    torch.testing.assert_close(logits(twin), logits(model), atol=1e-4, rtol=0)
    before, after = (Parameters(open_checkpoint(tmp_path / folder)) for folder in ("model", "twin"))
    for parameter in before.names:
        if parameter.endswith("_proj.weight"):
            change = after.rows(parameter) / before.rows(parameter) - 1
            assert np.median(np.abs(change)) > 0.02, parameter


def test_a_seed_makes_a_twin(script, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "model")
    names = ("one", "same", "other")
    for name, seed in zip(names, (1, 1, 2), strict=True):
        script.write_twin(tmp_path / name, tmp_path / "model", GGMLType.BF16, seed)
    one, same, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in names)
    assert one == same != other


def test_all_orthogonal_mixes_are_likely(script):
    rng = np.random.default_rng(0)
    mixes = [script.random_orthogonal(4, rng) for _ in range(2000)]
    for mix in mixes[:20]:
        np.testing.assert_allclose(mix @ mix.T, np.eye(4), atol=1e-12)
    assert np.abs(np.mean(mixes, axis=0)).max() < 0.05  # the library's own prefer a sign
