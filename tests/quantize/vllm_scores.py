"""What vLLM makes of a model: run by the Python of vLLM's own environment, knows nothing of octavo.

``python vllm_scores.py``, with JSON on stdin and stdout::

    {"model", "dtype", "windows": [[token, ...], ...], "prompt": [token, ...], "max_tokens"}
    {"nll": mean of -log p of all tokens but the windows' first, "tokens": greedy, after prompt}
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer(question: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams, TokensPrompt

    windows = question["windows"]
    length = max(len(window) for window in windows)
    llm = LLM(
        model=question["model"],
        dtype=question["dtype"],
        max_model_len=length + 1,
        max_num_seqs=4,
        enable_prefix_caching=False,
        enforce_eager=True,  # nothing here is run often enough for a compiler
    )
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([TokensPrompt(prompt_token_ids=window) for window in windows], scoring)
    nll = [
        -logprobs[token].logprob
        for window, output in zip(windows, scored, strict=True)
        for token, logprobs in zip(window[1:], output.prompt_logprobs[1:], strict=True)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=question["max_tokens"], ignore_eos=True)
    output = llm.generate([TokensPrompt(prompt_token_ids=question["prompt"])], greedy)[0]
    return {"nll": sum(nll) / len(nll), "tokens": list(output.outputs[0].token_ids)}


if __name__ == "__main__":  # vLLM's own processes import this file again
    # Of what is printed, only the answer is for who asks: vLLM's processes write to stdout too.
    stdout = os.dup(1)
    os.dup2(2, 1)
    result = answer(json.load(sys.stdin))
    with os.fdopen(stdout, "w") as file:
        json.dump(result, file)
