"""GGUF files of all families as llama.cpp reads them: its log-probabilities beside ours."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch
from llama_cpp_peer import RefusedError, llama_perplexity, log_probs_by_llama_cpp
from tiny_transformers import CASES, EXPERT_CASES, FAMILIES, LATENT_CASES, make_model

from octavo.base.errors import UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_export import export_gguf
from octavo.models.llama_cpp import unlike_in_llama_cpp
from octavo.models.parameters import Parameters
from octavo.quantization.ggml_types import GGMLType

CTX = 96
IDS = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
# It rounds where YaRN's ramp begins and ends, and gpt-oss does not: this ramp is cut off by both.
WHOLE_RAMP = {
    "rope_type": "yarn",
    "rope_theta": 5.0,
    "factor": 4.0,
    "original_max_position_embeddings": 150,
    "truncate": False,
}
CHANGED = {
    "gpt-oss": {"rope_parameters": WHOLE_RAMP},
    "gpt-oss-odd": {"rope_parameters": WHOLE_RAMP},
    "gemma2": {"query_pre_attn_scalar": 32},  # its heads' size, which files take for granted
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = random.Random(1).choices("abcdefghij klmnop qrstuvwxyz.", k=2 * CTX + 20)
    path.write_text("".join(letters))
    return path


@pytest.mark.skipif(llama_perplexity() is None, reason="llama-perplexity is not here")
@pytest.mark.parametrize("name", [*CASES, *EXPERT_CASES, *LATENT_CASES, *FAMILIES])
def test_what_llama_cpp_computes(name, text, tiny_model, driver, tmp_path):
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    # (Not named after a model: llama.cpp does special things for what is called phi-3.)
    make_model(name, **IDS, **CHANGED.get(name, {})).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_model / file, folder / file)
    try:
        export_gguf(path, open_checkpoint(folder), lambda matrix: GGMLType.F32)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    config = Parameters(open_checkpoint(path)).config
    ours, theirs = driver(path), by_llama_cpp(path, text, tmp_path)
    if unlike_in_llama_cpp(config):
        assert not agree(ours, theirs, 0.1)
    else:
        # 16 bits of what spans 14, and a GELU that is a table of float16.
        assert agree(ours, theirs, 4e-3 if config.activation.startswith("gelu") else 4e-4)


def by_llama_cpp(path, text, folder):
    """None where it would not read the file."""
    try:
        return log_probs_by_llama_cpp(path, text, CTX, folder)
    except RefusedError as error:
        print(error)
        return None


def agree(driver, theirs, tolerance):
    if theirs is None:
        return False
    ours = driver.logits([window.tokens for window in theirs], last=CTX // 2)
    worst = max(
        np.abs(torch.log_softmax(logits[:-1], -1).numpy() - window.log_probs).max()
        for logits, window in zip(ours, theirs, strict=True)
    )
    print(worst)
    return worst < tolerance


@pytest.mark.parametrize(("name", "lost"), [("mistral-window", "sliding window"), ("llama", None)])
def test_what_llama_cpp_would_not_do_is_said(name, lost, tiny_hf, tmp_path, caplog):
    export_gguf(tmp_path / "m.gguf", open_checkpoint(tiny_hf(name)), lambda matrix: GGMLType.F32)
    assert ("llama.cpp will not run this file" in caplog.text) == (lost is not None)
    assert (lost or "") in caplog.text
