"""GGUF files of hybrids in llama.cpp: the same perplexity of the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from llama_cpp_peer import llama_perplexity, perplexity_by_llama_cpp
from tiny_hybrids import GGUF_CASES, make_model

from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_export import export_gguf
from octavo.quality.windows import cut, tokenize
from octavo.quantization.ggml_types import GGMLType
from octavo.sources.open import load_tokenizer
from octavo.text.tokenizer_json import tokenizer_files

CTX, NUM_WINDOWS = 128, 2
TEXT = Path(__file__).parents[2] / "LICENSE"
SIZES = {"vocab_size": 49_152, "eos_token_id": 2, "bos_token_id": 1}

pytestmark = [
    pytest.mark.long,
    pytest.mark.network,
    pytest.mark.skipif(llama_perplexity() is None, reason="llama-perplexity is not here"),
]


@pytest.mark.parametrize("name", GGUF_CASES)
def test_llama_cpp_says_the_same(name, smollm2_gguf, driver, tmp_path):
    folder, out = tmp_path / "folder", tmp_path / "model.gguf"
    make_model(name, **SIZES, **GGUF_CASES[name]).save_pretrained(folder)
    tokenizer = open_checkpoint(smollm2_gguf)
    for file, text in tokenizer_files(tokenizer.metadata, smollm2_gguf).items():
        (folder / file).write_text(text, encoding="utf-8")
    export_gguf(out, open_checkpoint(folder), lambda matrix: GGMLType.F32)
    ours = perplexity(driver(out), out)
    theirs = perplexity_by_llama_cpp(out, TEXT, NUM_WINDOWS, CTX).value
    print(f"{name}: {ours:.2f}, llama.cpp {theirs:.2f}: {ours / theirs - 1:+.4%}")
    assert ours == pytest.approx(theirs, rel=1e-4)


def perplexity(model, path) -> float:
    """Of the second half of each window, as llama.cpp has it."""
    token_ids, bos = tokenize(TEXT.read_text("utf-8"), load_tokenizer(path))
    windows = cut(token_ids, CTX, bos_token_id=bos, max_tokens=CTX * NUM_WINDOWS)
    first, nll = CTX // 2, []
    for window, logits in zip(
        windows.token_ids, model.logits(windows.token_ids.tolist()), strict=True
    ):
        logprobs = logits[first:-1].double().log_softmax(-1)
        targets = torch.from_numpy(window[first + 1 :]).long()
        nll += (-logprobs.gather(1, targets[:, None])).flatten().tolist()
    return float(np.exp(np.mean(nll)))
