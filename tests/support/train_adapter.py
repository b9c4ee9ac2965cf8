"""Train an adapter with PEFT, in a process that has it: python train_adapter.py MODEL OUT TOKENS

TOKENS is JSON: texts as token ids. OUT gets the adapter, and ``logits.npy``: of the last text
[T, V], as transformers and PEFT compute them with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

STEPS = 30


def main(model_path: str, out: str, tokens: str) -> None:
    torch.manual_seed(0)
    texts = [torch.tensor([ids]) for ids in json.loads(Path(tokens).read_text())]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    settings = {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"v_proj": 4}}
    model = get_peft_model(model, LoraConfig("CAUSAL_LM", r=8, lora_alpha=16, **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(STEPS):
        ids = texts[step % len(texts)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    model.eval()
    model.save_pretrained(out)
    with torch.no_grad():
        logits = model(input_ids=texts[-1]).logits[0]
    np.save(Path(out) / "logits.npy", logits.numpy())
    print(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
