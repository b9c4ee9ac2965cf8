"""What the native kernels' rounding does to a real model's perplexity: next to nothing.

Weights are the same numbers in both; activations are rounded to 8 bits before a quantized weight
meets them, and keys and values to bfloat16.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.kernels.cpu import library

ROOT = Path(__file__).parent.parent
WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext-2" / "test.txt"
WINDOW = 512

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
]


def perplexity(model: Path, kernels: str, text: str, num_tokens: int) -> float:
    """Over windows of ``WINDOW`` tokens, each token but the first of a window scored."""
    with LLM(str(model), kernels=kernels, max_model_len=WINDOW + 1, max_num_seqs=4) as llm:
        token_ids = llm.get_tokenizer().encode(text)[:num_tokens]
        windows = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids), WINDOW)]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        outputs = llm.generate(windows, params, use_tqdm=False)
        assert llm.engine_info()["kernels"] == kernels
    scores = [
        entry[token_id].logprob
        for output in outputs
        for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    ]
    assert len(scores) == len(token_ids) - len(windows)
    return math.exp(-sum(scores) / len(scores))


def compare(model: Path, text: str, num_tokens: int) -> None:
    native = perplexity(model, "native", text, num_tokens)
    reference = perplexity(model, "reference", text, num_tokens)
    print(f"{model.name}: {native:.4f}, reference {reference:.4f}: {native / reference - 1:+.3%}")
    assert native == pytest.approx(reference, rel=5e-3)
    assert native != reference


def test_perplexity_of_our_own_documents(smollm2_gguf):
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    compare(smollm2_gguf, text, 2048)


@pytest.mark.skipif(not WIKITEXT.exists(), reason="WikiText-2 is not here")
@pytest.mark.long
@pytest.mark.parametrize("fixture", ["smollm2_gguf", "gemma3_gguf"])
def test_perplexity_of_wikitext(request, fixture):
    compare(request.getfixturevalue(fixture), WIKITEXT.read_text("utf-8"), 20_000)
