"""Answers with n-gram and suffix drafts, to the bit those without."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams

METHODS = ["ngram", "suffix"]
TEXT = "one two three, one two four; "


def sampling(**fields):
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **fields})


def repetitive(**fields):
    """A random model does not repeat itself; with five tokens to say it does."""
    return sampling(allowed_token_ids=list(range(97, 102)), **fields)


PARAMS = {
    "greedy": repetitive(temperature=0),
    "seeded": repetitive(temperature=0.7, seed=3, top_p=0.9),
    "penalties": repetitive(
        temperature=0.5, seed=5, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2
    ),
    "logprobs": repetitive(temperature=0.3, seed=7, logprobs=2),
    "samples": repetitive(temperature=0.4, seed=9, n=2),
    "forced": sampling(temperature=0, allowed_token_ids=[97, 98]),
}


def answers(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (sample.token_ids, sample.text, sample.logprobs, sample.finish_reason, sample.stop_reason)
        for output in outputs
        for sample in output.outputs
    ]


def drafts(llm):
    """What was drafted and what was right, of all requests so far."""
    return llm._text_engine.engine.scheduler.drafts


@pytest.fixture(scope="module")
def plain(tiny_model):
    with LLM(str(tiny_model), num_blocks=64, max_model_len=200, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module", params=METHODS)
def drafting(request, tiny_model):
    config = {"method": request.param}
    settings = {"num_blocks": 64, "max_model_len": 200, "threads": 1}
    with LLM(str(tiny_model), speculative_config=config, **settings) as llm:
        yield llm


@pytest.mark.parametrize("name", PARAMS)
def test_answers_are_those_without_drafts(plain, drafting, name):
    prompts = [TEXT * 3, TEXT + "one", "abcabcabcab"]
    expected = answers(plain, prompts, PARAMS[name])
    before = drafts(drafting).num_drafts
    assert answers(drafting, prompts, PARAMS[name]) == expected
    assert answers(drafting, prompts, PARAMS[name]) == expected  # with answers to go by
    assert drafts(drafting).num_drafts > before


def test_a_draft_ends_at_a_stop_string(plain, drafting):
    ((_, text, *_),) = answers(plain, "a b", PARAMS["forced"])
    for stop in (text[:2], text[7:12], text[-3:]):
        params = sampling(temperature=0, allowed_token_ids=[97, 98], stop=[stop])
        expected = answers(plain, "a b", params)
        assert expected[0][3] == "stop" and answers(drafting, "a b", params) == expected


def test_some_drafts_are_right(drafting):
    answers(drafting, TEXT * 3, PARAMS["forced"])
    assert 0 < drafts(drafting).num_accepted <= drafts(drafting).num_tokens


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("method", METHODS)
def test_a_copy_takes_few_steps(smollm2_gguf, method):
    prompt = "Repeat: The lighthouse was built in 1871 by Elias Thorne and stands forty metres."
    chat = [{"role": "user", "content": prompt}]
    params = [
        sampling(temperature=0, ignore_eos=False, logprobs=1),
        sampling(temperature=0.8, seed=1, n=2, frequency_penalty=0.1),
    ]
    answer = []
    for config in (None, {"method": method}):
        with LLM("smollm2-135m", max_model_len=512, speculative_config=config) as llm:
            outputs = [llm.chat(chat, each, use_tqdm=False)[0].outputs for each in params]
            answer.append([(o.token_ids, o.logprobs) for some in outputs for o in some])
            drafted = drafts(llm)
    assert answer[0] == answer[1]
    assert drafted.num_accepted > 10
