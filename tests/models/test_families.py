"""Families of models against transformers: logits, greedy tokens, and their GGUF files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_transformers import FAMILIES, VOCAB
from transformers import AutoModelForCausalLM

from octavo.errors import UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.models.parameters import Parameters
from octavo.quantization.ggml_types import GGMLType

PROMPTS = [
    torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (96, 71, 40)
]


@pytest.fixture(scope="module")
def made(tiny_hf):
    """The folder of a family's model, and the logits of PROMPTS as transformers has them."""
    known = {}

    def make(name):
        if name not in known:
            known[name] = tiny_hf(name), theirs_of(tiny_hf(name))
        return known[name]

    return make


def theirs_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in PROMPTS]


def difference(ours, theirs):
    """The largest; and a check that the best token is the same where rounding does not decide."""
    for a, b in zip(ours, theirs, strict=True):
        top = b.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2e-3
        assert torch.equal(a.argmax(-1)[clear], b.argmax(-1)[clear])
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, made, driver):
    folder, theirs = made(name)
    assert difference(driver(folder).logits(PROMPTS), theirs) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_native_logits_too(name, made, native_driver):
    folder, theirs = made(name)
    assert difference(native_driver(folder).logits(PROMPTS), theirs) < 1e-3


# Of those that GGUF files cannot say: a scale that llama.cpp takes from the size of heads, windows
# or layers without rope in another period than its own, activations that it does not ask for.
NOT_IN_GGUF = {
    "gemma2": "attention_scale",
    "smollm3-odd": "unrotated_layers",
    "cohere2-odd": "sliding window",
    "gpt2-odd": "activation",
    "opt": "no name",
    "opt-odd": "no name",
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_IN_GGUF])
def test_files_lead_there_and_back(name, made, native_driver, tmp_path):
    """A folder as a GGUF file, which answers the same; that as a folder, the same to the bit."""
    folder, theirs = made(name)
    gguf = tmp_path / "model.gguf"
    export_gguf(gguf, open_checkpoint(folder), lambda matrix: GGMLType.F32)
    assert difference(native_driver(gguf).logits(PROMPTS), theirs) < 1e-3
    write_hf_folder(tmp_path / "back", open_checkpoint(gguf))
    before, after = (Parameters(open_checkpoint(path)) for path in (folder, tmp_path / "back"))
    but = ("name", "bos_token_id", "architecture")  # Mistral without windows comes back as Llama
    assert before.config.differences(after.config, but) == []
    assert tensors_of(tmp_path / "back") == tensors_of(folder)
    for parameter in before.names:
        is_shifted = before.config.norm_plus_one and parameter.endswith("norm.weight")
        exact = {"rtol": 0, "atol": 1e-6 if is_shifted else 0}
        np.testing.assert_allclose(before.rows(parameter), after.rows(parameter), **exact)
    assert difference(theirs_of(tmp_path / "back"), theirs) < 1e-4


@pytest.mark.parametrize("name", NOT_IN_GGUF)
def test_what_a_gguf_file_cannot_say_is_an_error(name, made, tmp_path):
    folder, _ = made(name)
    with pytest.raises(UnsupportedModelError, match=NOT_IN_GGUF[name]):
        export_gguf(tmp_path / "model.gguf", open_checkpoint(folder), lambda m: GGMLType.F32)


def tensors_of(folder):
    """Names and shapes, but for a head that is tied."""
    with safe_open(folder / "model.safetensors", "np") as file:
        names = set(file.keys()) - {"lm_head.weight"}
        return {name: file.get_slice(name).get_shape() for name in names}
