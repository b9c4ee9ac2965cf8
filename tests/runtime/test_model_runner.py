from __future__ import annotations

import math

import pytest
import torch
from faults import FaultyForward, sometimes

from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams

PROMPT = [5, 17, 33, 64, 21, 8, 90]


def greedy(name: str, prompt=PROMPT, **fields) -> Request:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, **fields)
    return Request(name, prompt, params, 0.0)


@pytest.fixture
def poisoned(bench, monkeypatch):
    """Poisons the hidden states of a given token id, wherever it stands in a batch."""

    def poison(token_id: int, value: float = math.nan) -> None:
        forward = type(bench.model).forward

        def damaged(self, token_ids, ctx):
            hidden = forward(self, token_ids, ctx)
            return hidden.masked_fill((token_ids == token_id)[:, None], value)

        monkeypatch.setattr(type(bench.model), "forward", damaged)

    return poison


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_damage_ends_its_own_request_and_no_other(bench, run_all, poisoned, value):
    (expected, _) = run_all(bench.engine(), [greedy("good", [3, 4, 5])])
    poisoned(64, value)
    bad, good = greedy("bad"), greedy("good", [3, 4, 5])
    engine = bench.engine(block_size=2)
    answers, _ = run_all(engine, [bad, good])
    assert bad.finish_reason is FinishReason.ERROR and "NaN" in bad.error
    assert answers["good"] == expected["good"]


def test_damage_at_random_leaves_the_rest_untouched(bench, run_all):
    def requests() -> list[Request]:
        return [greedy(f"r{i}", [i + 2, *PROMPT, i + 3]) for i in range(12)]

    expected, _ = run_all(bench.engine(), requests())
    engine = bench.engine(max_num_seqs=5, max_num_batched_tokens=16)
    hurt = requests()
    runner = engine.executor.runner
    runner.forward = FaultyForward(runner.forward, damages=sometimes(0.15, seed=1))
    answers, _ = run_all(engine, hurt)
    failed = {r.request_id for r in hurt if r.finish_reason is FinishReason.ERROR}
    assert 0 < len(failed) < 12
    for name in expected.keys() - failed:
        assert answers[name] == expected[name]


def test_damage_in_the_middle_of_a_prompt_is_not_cached(bench, run_all, poisoned):
    poisoned(PROMPT[1])  # in the first chunk, which samples nothing
    engine = bench.engine(block_size=2, max_num_batched_tokens=4)
    request = greedy("bad")
    run_all(engine, [request])
    assert request.finish_reason is FinishReason.ERROR
    assert engine.scheduler.block_manager.num_cached_blocks == 0


def test_blocks_that_held_damage_serve_the_next_request(bench, run_all, poisoned, monkeypatch):
    expected, _ = run_all(bench.engine(num_blocks=8), [greedy("next", [3, 4, 5])])
    engine = bench.engine(num_blocks=8)
    for layer in range(bench.config.num_layers):
        for cache in engine.executor.runner.forward.kv_cache.layer(layer):
            for memory in cache.parts:
                memory.fill_(math.nan)
    answers, _ = run_all(engine, [greedy("next", [3, 4, 5])])
    assert answers == expected


def test_prompt_logprobs_are_those_of_a_plain_forward_pass(bench, run_all):
    request = greedy("a", prompt_logprobs=2)
    answers, _ = run_all(bench.engine(max_num_batched_tokens=3), [request])
    reported = answers["a"][1][: len(PROMPT) - 1]
    # An independent account: the greedy answer to each prefix, and its probabilities.
    for position, entry in enumerate(reported):
        prefix = greedy("p", PROMPT[: position + 1], logprobs=20)
        alone, _ = run_all(bench.engine(prefix_caching=False), [prefix])
        top = dict(alone["p"][1][0].top)
        assert entry.token_id == PROMPT[position + 1]
        assert [t for t, _ in entry.top] == list(top)[:2]
        for token_id, logprob in entry.top:
            assert logprob == top[token_id]


def test_a_seed_gives_the_same_tokens_whatever_runs_beside(bench, run_all):
    def sampled(name: str, seed: int) -> Request:
        params = SamplingParams(max_tokens=8, temperature=1.3, ignore_eos=True)
        return Request(name, PROMPT, params, 0.0, seed=seed)

    alone, _ = run_all(bench.engine(), [sampled("a", 42)])
    company = [sampled(f"x{i}", i) for i in range(7)]
    together, _ = run_all(bench.engine(), [*company[:3], sampled("a", 42), *company[3:]])
    assert together["a"] == alone["a"]
    assert len({tuple(tokens) for tokens, _ in together.values()}) > 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_greedy_tokens(tiny_model, load_bench, run_all, bench):
    gpu = load_bench(tiny_model, "cuda")
    requests = [greedy(str(i), PROMPT[i:] + PROMPT) for i in range(5)]
    expected, _ = run_all(bench.engine(), requests)
    requests = [greedy(str(i), PROMPT[i:] + PROMPT) for i in range(5)]
    answers, _ = run_all(gpu.engine(), requests)
    assert {k: v[0] for k, v in answers.items()} == {k: v[0] for k, v in expected.items()}
