"""Beam search: the beams of transformers, of texts that end and of those that do not."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, BeamSearchParams
from octavo.base.errors import InvalidRequestError, RequestError
from octavo.serving.beam_search import BeamSearch

PROMPTS = [[5, 9, 23, 40], [7] * 20, [3]]


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), max_model_len=200, dtype="float32", kernels="reference") as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def of_transformers(model, prompt, params: BeamSearchParams, ends):
    """Tokens and score of each beam."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows = []
    for tokens, score in zip(
        found.sequences.tolist(), found.sequences_scores.tolist(), strict=True
    ):
        end = next(
            (place + 1 for place in range(len(prompt), len(tokens)) if tokens[place] in ends),
            len(prompt) + params.max_tokens,
        )
        rows.append((tokens[:end], score))
    return rows


@pytest.mark.parametrize(
    "asked",
    [
        {"beam_width": 4, "max_tokens": 10},
        {"beam_width": 3, "max_tokens": 16, "length_penalty": 2.0},
        {"beam_width": 5, "max_tokens": 16, "length_penalty": 0.0},
        {"beam_width": 2, "max_tokens": 16, "early_stopping": True},
        {"beam_width": 3, "max_tokens": 16, "early_stopping": "never"},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_ends", [0, 5])
def test_beams_are_those_of_transformers(llm, oracle, asked, num_ends, monkeypatch):
    # Ends that come: tokens of the beams that there are without.
    endless = llm.beam_search(PROMPTS, BeamSearchParams(**asked, ignore_eos=True))
    likely = [beam.tokens[-5] for output in endless for beam in output.sequences[1:]]
    ends = tuple(dict.fromkeys(likely))[:num_ends]
    monkeypatch.setattr(llm._text_engine, "eos_token_ids", ends)
    params = BeamSearchParams(**asked)
    outputs = llm.beam_search(PROMPTS, params)
    reasons = {beam.finish_reason for output in outputs for beam in output.sequences}
    if asked.get("length_penalty", 1.0) <= 1.0:  # or else those that go on are better
        assert ("stop" in reasons) == bool(ends)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = of_transformers(oracle, prompt, params, ends)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        scores = [beam.score for beam in output.sequences]
        assert scores == pytest.approx([score for _, score in expected], abs=1e-3)
        for beam in output.sequences:
            is_end = beam.tokens[-1] in ends
            assert beam.finish_reason == ("stop" if is_end else "length")
            assert beam.text is not None


def test_one_beam_is_a_greedy_answer(llm):
    greedy = llm.default_sampling_params().with_changes(temperature=0.0, max_tokens=8)
    for answer, found in zip(
        llm.generate(PROMPTS, greedy), llm.beam_search(PROMPTS, BeamSearchParams(1, 8)), strict=True
    ):
        (beam,) = found.sequences
        assert beam.tokens == [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


def test_a_few_at_a_time_find_the_same(llm):
    params = BeamSearchParams(3, 6, ignore_eos=True)
    assert llm.beam_search(PROMPTS, params) == llm.beam_search(PROMPTS, params, concurrency_limit=1)


def test_blocks_of_beams_are_shared(llm):
    """A beam computes what is not in whole blocks yet, and no more."""
    found, run = [], llm._run

    def watched(*args):
        found.append(run(*args))
        return found[-1]

    llm._run = watched
    try:
        llm.beam_search([[9] * 40], BeamSearchParams(3, 12, ignore_eos=True))
    finally:
        del llm._run
    for outputs in found[1:]:
        for output in outputs:
            whole = (len(output.prompt_token_ids) - 1) // 16 * 16
            assert output.num_cached_tokens == whole


def test_the_best_of_all_continuations_is_found():
    """Of a chain of tokens whose probabilities depend on the last one, with beams for all."""
    table = {0: {0: -0.1, 1: -2.4}, 1: {0: -1.6, 1: -0.2}}
    search = BeamSearch([0], BeamSearchParams(8, 3), ends=())
    while not search.is_over:
        search.advance([table[beam.tokens[-1]] for beam in search.running])
    scores = {}
    for path in itertools.product((0, 1), repeat=3):
        steps = itertools.pairwise((0, *path))
        scores[path] = sum(table[last][token] for last, token in steps) / 3
    best = search.written(str).sequences
    assert [tuple(beam.tokens[1:]) for beam in best] == sorted(scores, key=lambda p: -scores[p])
    assert all(math.isclose(beam.score, scores[tuple(beam.tokens[1:])]) for beam in best)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 21),
        ("beam_width", True),
        ("max_tokens", 0),
        ("temperature", 0.7),
        ("length_penalty", math.nan),
        ("length_penalty", "1"),
        ("early_stopping", "soon"),
        ("structured_outputs", {"json": {}}),
        ("watermarking", {"key": 1}),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError) as refused:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, field: value})
    assert refused.value.field == field


def test_a_prompt_that_is_too_long_is_refused_before_any_work(llm):
    with pytest.raises(RequestError):
        llm.beam_search([[5] * 190], BeamSearchParams(2, 20))
