"""The worker of transformers, by `generate` in bfloat16, as its documentation shows it.

Engine settings, for GPUs: `device`, and `cache_implementation`, which `generate` is given.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
import worker


class TransformersEngine:
    def __init__(self, settings: dict[str, Any]):
        torch.set_num_threads(settings["threads"])
        self.options = dict(settings["engine"])
        self.device = self.options.pop("device", "cpu")
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.bfloat16
        )
        self.model.eval().to(self.device)
        self.vocab_size = self.model.config.vocab_size

    def generate(self, prompts: list[worker.TokenIds], max_tokens: int) -> worker.Timing:
        ids = torch.tensor(prompts, device=self.device)
        started = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                **self.options,
            )
            output = output.cpu()  # which waits for a GPU
        elapsed = time.perf_counter() - started
        worker.check_lengths(output[:, ids.shape[1] :].tolist(), max_tokens)
        return worker.Timing(elapsed)

    def about(self) -> dict[str, Any]:
        return {"version": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    worker.serve(TransformersEngine)
