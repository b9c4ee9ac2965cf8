"""What transformers makes of a model: as ``vllm_scores.py``, with the same question and answer."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer(question: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, question["dtype"])
    model = AutoModelForCausalLM.from_pretrained(question["model"], dtype=dtype).eval()
    nll = []
    with torch.inference_mode():
        for window in question["windows"]:
            tokens = torch.tensor([window])
            logprobs = model(tokens).logits[0, :-1].double().log_softmax(-1)
            nll += (-logprobs.gather(1, tokens[0, 1:, None])).flatten().tolist()
        prompt = torch.tensor([question["prompt"]])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=question["max_tokens"],
            max_new_tokens=question["max_tokens"],
        )
    return {"nll": sum(nll) / len(nll), "tokens": output[0, prompt.shape[1] :].tolist()}


if __name__ == "__main__":
    # Of what is printed, only the answer is for who asks.
    stdout = os.dup(1)
    os.dup2(2, 1)
    result = answer(json.load(sys.stdin))
    with os.fdopen(stdout, "w") as file:
        json.dump(result, file)
