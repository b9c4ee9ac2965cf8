"""Perplexity of a real model beside that of transformers and of llama.cpp, on the same tokens."""

from __future__ import annotations

import hashlib
import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_cpp_peer import llama_perplexity, perplexity_by_llama_cpp
from weights import dequantized_once

from octavo.kernels.cpu import library
from octavo.quality.perplexity import score_windows
from octavo.quality.windows import ScoringWindows, cut, tokenize
from octavo.system.machine import cpu

ROOT = Path(__file__).parents[2]
WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext-2" / "test.txt"
RECORDED = Path(__file__).parent / "recorded" / "two_windows.json"
CTX = 512

pytestmark = [pytest.mark.slow, pytest.mark.network]
needs_wikitext = pytest.mark.skipif(not WIKITEXT.exists(), reason="WikiText-2 is not here")


def windows_of(text_engine, text: str, num_tokens: int, ctx: int = CTX) -> ScoringWindows:
    token_ids, bos_token_id = tokenize(text, text_engine.tokenizer)
    return cut(token_ids, ctx, bos_token_id=bos_token_id, max_tokens=num_tokens)


@pytest.fixture
def all_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(cpu().usable_cores)
    yield
    torch.set_num_threads(before)


@torch.inference_mode()
def perplexity_by_transformers(gguf: Path, windows: ScoringWindows) -> float:
    """In float32, window by window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()
    nll: list[float] = []
    first = windows.ctx // 2
    for window in torch.from_numpy(windows.token_ids).long():
        logits = model(window[None]).logits[0, first:-1]
        logprobs = logits.double().log_softmax(-1)
        nll += (-logprobs.gather(1, window[first + 1 :, None])).flatten().tolist()
    return float(np.exp(np.mean(nll)))


def compare_with_transformers(gguf: Path, load, text: str, num_tokens: int, ctx: int) -> None:
    text_engine = load(ctx, gguf, kernels="reference", dtype="float32")
    windows = windows_of(text_engine, text, num_tokens, ctx)
    ours = score_windows(text_engine.engine, windows).perplexity.value
    theirs = perplexity_by_transformers(gguf, windows)
    print(f"reference ops {ours:.5f}, transformers {theirs:.5f}: {ours / theirs - 1:+.4%}")
    assert ours == pytest.approx(theirs, rel=1e-3)


# -- two windows, and what transformers said of them ----------------------------------------------


def two_windows(gguf: Path, load) -> tuple[Any, ScoringWindows, dict[str, str]]:
    """An engine, windows of a text that does not change, and what a record of them is about."""
    text_engine = load(128, gguf, kernels="reference", dtype="float32")
    windows = windows_of(text_engine, (ROOT / "LICENSE").read_text("utf-8"), 256, ctx=128)
    with open(gguf, "rb") as file:
        model = hashlib.file_digest(file, "sha256").hexdigest()
    tokens = hashlib.sha256(json.dumps(windows.token_ids.tolist()).encode()).hexdigest()
    return text_engine, windows, {"model": model, "tokens": tokens}


def test_two_windows_against_transformers(smollm2_gguf, load) -> None:
    text_engine, windows, about = two_windows(smollm2_gguf, load)
    recorded = json.loads(RECORDED.read_text())
    assert about.items() <= recorded.items(), "the record is of something else: -m long --record"
    with dequantized_once():
        ours = score_windows(text_engine.engine, windows).perplexity.value
    assert ours == pytest.approx(recorded["perplexity"], rel=1e-3)


@pytest.mark.long
def test_the_record_is_what_transformers_says(smollm2_gguf, load, all_cores, request) -> None:
    _, windows, about = two_windows(smollm2_gguf, load)
    theirs = perplexity_by_transformers(smollm2_gguf, windows)
    if request.config.getoption("--record"):
        record = {**about, "transformers": version("transformers"), "perplexity": theirs}
        RECORDED.write_text(json.dumps(record, indent=1) + "\n")
    assert json.loads(RECORDED.read_text())["perplexity"] == pytest.approx(theirs, rel=1e-6)


# -- WikiText ------------------------------------------------------------------------------------


@needs_wikitext
@pytest.mark.long
def test_wikitext_against_transformers(smollm2_gguf, load, all_cores) -> None:
    compare_with_transformers(smollm2_gguf, load, WIKITEXT.read_text("utf-8"), 20_000, CTX)


@needs_wikitext
@pytest.mark.long
@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
@pytest.mark.skipif(llama_perplexity() is None, reason="llama-perplexity is not here")
def test_wikitext_against_llama_cpp(smollm2_gguf, load) -> None:
    """The same file, windows and scored tokens; and the same estimate of the error."""
    text_engine = load(CTX, smollm2_gguf, kernels="native")
    windows = windows_of(text_engine, WIKITEXT.read_text("utf-8"), 20_000)
    ours = score_windows(text_engine.engine, windows).perplexity
    theirs, theirs_stderr = perplexity_by_llama_cpp(smollm2_gguf, WIKITEXT, len(windows), CTX)
    print(f"octavo {ours.value:.4f} ± {ours.stderr:.4f}, llama.cpp {theirs} ± {theirs_stderr}")
    assert ours.value == pytest.approx(theirs, rel=5e-3)
    assert ours.stderr == pytest.approx(theirs_stderr, rel=2e-2)
