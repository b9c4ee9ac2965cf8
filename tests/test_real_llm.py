"""The default model, from its name to its answer."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.network]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    with LLM("smollm2-135m", max_model_len=512) as llm:
        yield llm


def test_it_knows_capitals(llm):
    (output,) = llm.generate("The capital of France is", GREEDY)
    assert output.outputs[0].text.startswith(" Paris.")
    # Not of France: there the model starts "The" or "L'Étoile" with almost the same probability.
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of Japan?"}], GREEDY)
    assert "Tokyo" in output.outputs[0].text
    assert output.prompt.startswith("<|im_start|>system\n")


def test_an_answer_in_company_is_the_answer_alone(llm):
    prompts = ["Water boils at", "Once upon a time", "def main():", "The capital of France is"]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in prompts]
    together = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
