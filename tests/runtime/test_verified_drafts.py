"""Drafts under the engine: what a pass says of their rows, and what the rules make of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hash_model import FunctionProposer

from octavo.core.batch import Draft
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.token_mask import create_mask
from octavo.kernels.cpu import library
from octavo.runtime.acceptance import SyntheticAcceptance, TypicalAcceptance
from octavo.runtime.sampler import probabilities
from octavo.runtime.sampling_row import rows_of, sampling_row
from octavo.runtime.verification import ExactAcceptance, SampledDraft, VerifiedDraft

V = 260
KERNELS = ["reference", "fused", *(["native"] if library.runnable() else [])]
SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 3},
    {"top_p": 0.7, "repetition_penalty": 1.3},
    {"min_p": 0.1, "frequency_penalty": 0.5, "logprobs": 2},
    {"typical_p": 0.8, "logit_bias": {7: 6.0}, "logprobs": 0},
    {"allowed_token_ids": list(range(0, V, 3)), "logprobs": 3},
    {"temperature": 0.0, "logprobs": 2},
]


def requests() -> list[Request]:
    rng = random.Random(4)
    made = []
    for index, settings in enumerate(SETTINGS):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **settings)
        mask = create_mask(params, V, (), [])
        prompt = [rng.randrange(3, V) for _ in range(rng.randint(2, 9))]
        made.append(Request(f"r{index}", prompt, params, 0.0, seed=index, mask=mask))
    return made


def mostly_wrong(prompt, position: int) -> Draft | None:
    """Nothing now and then, and else some tokens that depend on the place alone; few are likely."""
    rng = random.Random(f"{prompt} {position}")
    return (
        Draft.chain([rng.randrange(V) for _ in range(rng.randint(1, 4))]) if position % 5 else None
    )


class Oracle:
    """Drafts what would be sampled without drafts, and errs at times."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]):
        self.answers = answers

    def __call__(self, prompt, position: int) -> Draft | None:
        truth = self.answers[tuple(prompt)][position - len(prompt) :][:4]
        if position % 3 == 0 and len(truth) > 2:
            truth[2] = (truth[2] + 1) % V
        return Draft.chain(truth) if truth else None


def engine_of(bench, kernels: str, acceptance=None, propose=None, **limits):
    engine = bench.engine(kernels=kernels, **limits)
    runner = engine.executor.runner
    if acceptance is not None:
        runner.acceptance = acceptance
    if propose is not None:
        old = engine.scheduler
        proposer = FunctionProposer(propose)
        engine.scheduler = Scheduler(old.config, old.block_manager, old.admission, proposer)
    return engine, runner


class Watched:
    """Another rule, with everything that it was asked."""

    def __init__(self, rule):
        self.rule = rule
        self.asked: list[tuple[SampledDraft, VerifiedDraft]] = []

    def weighs(self, batch):
        return self.rule.weighs(batch)

    def verify(self, sampled_draft: SampledDraft) -> VerifiedDraft:
        verified = self.rule.verify(sampled_draft)
        self.asked.append((sampled_draft, verified))
        return verified


@pytest.fixture(scope="module", params=KERNELS)
def plain(request, bench, run_all):
    engine, _ = engine_of(bench, request.param)
    answers, _ = run_all(engine, requests())
    return request.param, answers


def oracle(answers) -> Oracle:
    return Oracle({tuple(r.prompt_token_ids): answers[r.request_id][0].copy() for r in requests()})


@pytest.mark.parametrize("right", [True, False])
def test_exact_acceptance_changes_nothing_and_asks_for_nothing(bench, run_all, plain, right):
    kernels, expected = plain
    watched = Watched(ExactAcceptance())
    propose = oracle(expected) if right else mostly_wrong
    engine, runner = engine_of(bench, kernels, watched, propose)
    answers, steps = run_all(engine, requests())
    assert answers == expected
    assert all(sampled_draft.probabilities is None for sampled_draft, _ in watched.asked)
    accepted = sum(len(verified.path) for _, verified in watched.asked)
    assert accepted > 60 if right else accepted < 20


@pytest.mark.parametrize("kernels", KERNELS)
def test_probabilities_of_a_step_are_those_of_its_logits(bench, run_all, kernels):
    """With all that a request asks for, at each drafted place, and as the oracle has them."""
    compared: list[tuple[np.ndarray, np.ndarray]] = []
    weighed: dict[str, bool] = {}

    class Compared(TypicalAcceptance):
        def verify(self, sampled_draft: SampledDraft) -> VerifiedDraft:
            verified = super().verify(sampled_draft)
            weighed[sampled_draft.request.request_id] = sampled_draft.probabilities is not None
            if sampled_draft.probabilities is not None:
                found = sampled_draft.probabilities.copy()
                logits = runner.forward.logits(range(len(found)))  # it is alone
                rows = [
                    sampling_row(row) for row in rows_of(sampled_draft.request, sampled_draft.draft)
                ]
                expected = probabilities(torch.as_tensor(logits).clone(), rows).numpy()
                compared.append((found, expected))
            return verified

    engine, runner = engine_of(bench, kernels, Compared(), mostly_wrong)
    made = requests()
    run_all(engine, made, together=False)
    assert weighed == {r.request_id: r.params.temperature > 0 for r in made}
    assert not any(request.error for request in made)
    assert sum(len(found) for found, _ in compared) > 150
    for found, expected in compared:
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rule", [TypicalAcceptance(), SyntheticAcceptance([0.8, 0.5, 0.5])])
def test_answers_do_not_depend_on_the_company(bench, run_all, kernels, rule):
    alone, _ = run_all(engine_of(bench, kernels, rule, mostly_wrong)[0], requests(), together=False)
    together, _ = run_all(engine_of(bench, kernels, rule, mostly_wrong)[0], requests())
    assert together == alone


def test_greedy_answers_are_those_without_drafts(bench, run_all, plain):
    kernels, expected = plain
    for propose in (oracle(expected), mostly_wrong):
        answers, _ = run_all(engine_of(bench, kernels, TypicalAcceptance(), propose)[0], requests())
        for index in (1, 7):
            assert answers[f"r{index}"] == expected[f"r{index}"]


@pytest.mark.skipif("native" not in KERNELS, reason="no native library was built")
@pytest.mark.parametrize("rule", [TypicalAcceptance(), SyntheticAcceptance([0.7, 0.7])])
def test_logprobs_are_those_of_the_tokens_that_came(bench, run_all, rule):
    """As of a prompt that has them already: bit for bit."""
    made = requests()
    engine, _ = engine_of(bench, "native", rule, mostly_wrong)
    answers, _ = run_all(engine, made)
    for request in made:
        num_top = request.params.logprobs
        if num_top is None:
            continue
        token_ids, logprobs = answers[request.request_id]
        params = SamplingParams(max_tokens=1, prompt_logprobs=num_top)
        prompt = [*request.prompt_token_ids, *token_ids]
        again, _ = run_all(
            bench.engine(kernels="native", prefix_caching=False),
            [Request("again", prompt, params, 0.0)],
        )
        assert logprobs == again["again"][1][request.num_prompt_tokens - 1 :][: len(token_ids)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_synthetic_rates_show_in_the_statistics(bench, run_all, kernels):
    engine, _ = engine_of(
        bench,
        kernels,
        SyntheticAcceptance([1.0, 0.5]),
        lambda prompt, position: Draft.chain([9, 9, 9]),
    )
    made = requests()[:4]
    _, steps = run_all(engine, made)
    stats = engine.scheduler.drafts
    first, second, *rest = [*stats.accepted_by_position, 0]
    assert first == stats.num_drafts and not any(rest)
    assert 0.2 < second / first < 0.8
