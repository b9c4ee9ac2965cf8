"""A pass key that is hidden in four thousand tokens of other text, with each type of KV cache."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.kernels.cpu import library

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
KEYS = ("71432", "90518")
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
CONTEXT = 4096


def prompt(llm: LLM, key: str, depth: float) -> str:
    """As many sentences as fit, with the key behind that part of them."""
    intro = "There is a pass key hidden in a long text. Find it and remember it. "
    needle = f"The pass key is {key}. Remember it. {key} is the pass key. "
    question = "What is the pass key? The pass key is"

    def count(text: str) -> int:
        return len(llm.get_tokenizer().encode(text))

    room = CONTEXT - 32 - count(intro) - count(needle) - count(question)
    times = room // (count(FILLER * 101) - count(FILLER * 100))
    before = round(times * depth)
    return intro + FILLER * before + needle + FILLER * (times - before) + question


@pytest.mark.long
@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
@pytest.mark.parametrize("kv", ["f32", "bf16", "int8", "fp8", "k8v4", "int4"])
def test_a_pass_key_in_four_thousand_tokens(smollm2_gguf, kv):
    asked = [(key, depth) for key in KEYS for depth in DEPTHS]
    params = SamplingParams(max_tokens=8, temperature=0)
    found = 0
    with LLM(str(smollm2_gguf), max_model_len=CONTEXT, kv_cache_dtype=kv) as llm:
        for key, depth in asked:  # one by one: what is before the key is there from the last one
            (output,) = llm.generate([prompt(llm, key, depth)], params)
            text, is_right = output.outputs[0].text, key in output.outputs[0].text
            print(key, depth, len(output.prompt_token_ids), repr(text), "" if is_right else "WRONG")
            found += is_right
    print(kv, found, "of", len(asked))
    assert found == len(asked)
