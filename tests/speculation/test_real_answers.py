"""A real model, hundreds of prompts, every drafter: the tokens of plain decoding.

``-m long``: some minutes.
"""

from __future__ import annotations

import itertools
import random

import pytest

from octavo import LLM, SamplingParams

METHODS = {
    "ngram": {},
    "suffix": {},
    "auto": {},
    "draft_model": {"model": "smollm2-135m", "num_speculative_tokens": 4},
    "early_exit": {"exit_layer": 22, "num_speculative_tokens": 2},
}
TASKS = (
    "Repeat this sentence three times: {}",
    "Translate into French: {}",
    "Write a short poem about this: {}",
    "Return this as JSON with the keys subject and verb: {}",
    "What comes after this? {}",
)
SUBJECTS = ("the old clock", "a grey cat", "our teacher", "the river", "a tall ship", "her brother")
VERBS = ("waits for", "has lost", "remembers", "draws", "is looking at", "sold", "will find")
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "presence_penalty": 0.5},
    {"temperature": 0.7, "min_p": 0.05, "stop": [".", "\n\n"]},
    {"temperature": 1.2, "min_tokens": 12, "logprobs": 1},
    {"temperature": 0.6, "n": 2},
)


def requests() -> list[tuple[str, SamplingParams]]:
    """210 prompts, each with its settings."""
    rng = random.Random(1)
    found = []
    for number, (task, subject, verb) in enumerate(itertools.product(TASKS, SUBJECTS, VERBS)):
        sentence = f"{subject.capitalize()} {verb} {rng.choice(SUBJECTS)} in the garden."
        settings = SETTINGS[number % len(SETTINGS)]
        params = SamplingParams(max_tokens=24, seed=number, **settings)
        found.append((task.format(sentence), params))
    return found


def answers(llm: LLM, batch_size: int, enabled: bool) -> tuple[list, int]:
    """Of all requests, so many at once: tokens, text, log-probabilities, and why they end. And how
    many draft tokens were accepted."""
    found = []
    asked = requests()
    for begin in range(0, len(asked), batch_size):
        some = asked[begin : begin + batch_size]
        params = [each.with_changes(speculative={"enabled": enabled}) for _, each in some]
        found += llm.generate([prompt for prompt, _ in some], params)
    num_accepted = sum(output.metrics.drafts.num_accepted for output in found)
    return [output.outputs for output in found], num_accepted


@pytest.mark.long
@pytest.mark.network
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_plain_decoding(method):
    config = {"method": method, **METHODS[method]}
    with LLM("smollm2-135m", max_model_len=256, speculative_config=config) as llm:
        plain, _ = answers(llm, 32, enabled=False)
        assert len(plain) == 210
        for batch_size in (1, 7, 32):
            drafted, num_accepted = answers(llm, batch_size, enabled=True)
            assert drafted == plain
            assert num_accepted > 100
