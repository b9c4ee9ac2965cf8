"""The worker of vLLM, which runs in the environment that setup_vllm makes, and knows nothing of
octavo.

Its environment variables (threads, memory, caches) are set by the process that starts it.
"""

from __future__ import annotations

import time
from typing import Any

import worker


class VLLMEngine:
    def __init__(self, settings: dict[str, Any]):
        import vllm

        self.version = vllm.__version__
        self.settings = {
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 64,
            # The times of each request's first and last token.
            "disable_log_stats": False,
            **settings["engine"],
        }
        self.llm = vllm.LLM(model=settings["model"], **self.settings)
        self.vocab_size = self.llm.llm_engine.model_config.get_vocab_size()

    def generate(self, prompts: list[worker.TokenIds], max_tokens: int) -> worker.Timing:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        elapsed = time.perf_counter() - started
        worker.check_lengths([output.outputs[0].token_ids for output in outputs], max_tokens)
        metrics = outputs[0].metrics
        if len(prompts) > 1 or max_tokens < 2 or metrics is None:
            return worker.Timing(elapsed)
        return worker.Timing(elapsed, metrics.last_token_ts - metrics.first_token_ts)

    def about(self) -> dict[str, Any]:
        return {"version": self.version, "settings": self.settings}


if __name__ == "__main__":  # vLLM's own processes import this file again
    worker.serve(VLLMEngine)
