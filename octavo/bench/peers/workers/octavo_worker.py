"""The worker of octavo, by the public API, with the defaults that every user gets."""

from __future__ import annotations

import time
from typing import Any

import worker

from octavo import LLM, SamplingParams, __version__


class OctavoEngine:
    def __init__(self, settings: dict[str, Any]):
        self.settings = settings["engine"]
        self.llm = LLM(settings["model"], **self.settings)
        self.vocab_size = self.llm.get_tokenizer().vocab_size

    def generate(self, prompts: list[worker.TokenIds], max_tokens: int) -> worker.Timing:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        elapsed = time.perf_counter() - started
        worker.check_lengths([output.outputs[0].token_ids for output in outputs], max_tokens)
        tpot = outputs[0].metrics.tpot
        if len(prompts) > 1 or tpot is None:
            return worker.Timing(elapsed)
        return worker.Timing(elapsed, tpot * (max_tokens - 1))

    def about(self) -> dict[str, Any]:
        config = self.llm.config
        return {
            "version": __version__,
            "settings": self.settings,
            "engine": self.llm.engine_info(),
            "choices": list(config.choices),
        }


if __name__ == "__main__":
    worker.serve(OctavoEngine)
