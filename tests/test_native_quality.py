"""What the native kernels' rounding does to a real model's perplexity: next to nothing.

Weights are the same numbers in both; activations are rounded to 8 or 15 bits before a quantized
weight meets them, and keys and values to bfloat16. Where all have 15 bits, nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.kernels.cpu import library
from octavo.quality.logit_file import LogitFile
from octavo.quality.perplexity import PerplexityResult, engine_args, measure
from octavo.quality.windows import cut, tokenize
from octavo.serving.load import load_engine

ROOT = Path(__file__).parent.parent
WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext-2" / "test.txt"
WINDOW = 512

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
]


def measure_windows(
    model: Path,
    kernels: str,
    text: str,
    num_tokens: int,
    settings: Mapping[str, Any] | None = None,
    **base: Any,
) -> PerplexityResult:
    """Over windows of ``WINDOW`` tokens, each token but the first of a window scored."""
    loaded = load_engine(engine_args(str(model), WINDOW, kernels=kernels, **(settings or {})))
    assert loaded.info["kernels"] == kernels
    text_engine = loaded.text_engine
    token_ids, bos = tokenize(text, text_engine.tokenizer)
    windows = cut(token_ids, WINDOW, score="all", bos_token_id=bos, max_tokens=num_tokens)
    assert windows.num_scored == num_tokens // WINDOW * (WINDOW - 1)
    result = measure(text_engine, windows, model=model.name, **base)
    text_engine.engine.close()
    return result


def check(model: Path, native: PerplexityResult, reference: PerplexityResult) -> None:
    ours, theirs = native.scores.perplexity.value, reference.scores.perplexity.value
    print(f"{model.name}: {ours:.4f}, reference {theirs:.4f}: {ours / theirs - 1:+.3%}")
    assert ours == pytest.approx(theirs, rel=5e-3)
    assert ours != theirs


def test_our_own_documents(smollm2_gguf, tmp_path):
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    text = text[:8192]  # more than 512 tokens
    base = tmp_path / "base"
    reference = measure_windows(smollm2_gguf, "reference", text, 512, save_base=base)
    kl = {}
    runs = [("int8", "auto"), ("auto", "auto"), ("int16", "auto"), ("int16", "int8")]
    for activations, kv in runs:
        settings = {"activations": activations, "kv_cache_dtype": kv}
        native = measure_windows(smollm2_gguf, "native", text, 512, settings, base=LogitFile(base))
        divergence = native.divergence
        assert divergence is not None
        kl[activations, kv] = divergence.kl.value
        same = divergence.same_top.value
        print(f"{activations}, KV {kv}: KL {divergence.kl.value:.2e}, same {same:.2%}")
        if activations == "auto":
            check(smollm2_gguf, native, reference)
            assert same > 0.96
    assert 0 < kl["int8", "auto"] < 6e-3
    assert 0 < kl["auto", "auto"] < kl["int8", "auto"] / 3
    assert 0 <= kl["int16", "auto"] < 1e-6
    assert 0 < kl["int16", "int8"] < 5e-4


@pytest.mark.skipif(not WIKITEXT.exists(), reason="WikiText-2 is not here")
@pytest.mark.long
@pytest.mark.parametrize("fixture", ["smollm2_gguf", "gemma3_gguf"])
def test_wikitext(request, fixture):
    model, text = request.getfixturevalue(fixture), WIKITEXT.read_text("utf-8")
    native = measure_windows(model, "native", text, 20_000)
    check(model, native, measure_windows(model, "reference", text, 20_000))
