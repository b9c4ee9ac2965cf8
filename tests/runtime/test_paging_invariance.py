"""Tokens and log-probabilities do not depend on how a request was run, to the last bit.

Block size, token budget, the size of the pool (with preemptions), the prefix cache, the company in
a batch and the batching policy may change when something is computed, and never what comes out.
"""

from __future__ import annotations

import random

import pytest
from weights import dequantized_once

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.executor.faulty import FaultyScheduler, every

VARIANTS = {
    "block size 1": {"block_size": 1, "num_blocks": 1024},
    "block size 4": {"block_size": 4, "num_blocks": 256},
    "block size 32": {"block_size": 32, "num_blocks": 32},
    "budget 1": {"max_num_batched_tokens": 1},
    "budget 7": {"max_num_batched_tokens": 7},
    "budget 64": {"max_num_batched_tokens": 64},
    "no prefix cache": {"prefix_caching": False},
    "tiny pool": {"num_blocks": 30, "block_size": 4},
    "tiny pool, no cache": {"num_blocks": 30, "block_size": 4, "prefix_caching": False},
    "three seats": {"max_num_seqs": 3},
    "static": {"static": True, "max_num_seqs": 4},
    "unchunked": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
}


def make_requests(
    vocab_size: int, count: int = 10, most: int = 70, longest_answer: int = 40
) -> list[Request]:
    """Prompts with shared prefixes, greedy and sampled, some of them with prompt logprobs."""
    rng = random.Random(3)
    shared = [rng.randrange(2, vocab_size) for _ in range(40)]
    requests = []
    leader = None
    for index in range(count):
        own = [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, most - 40))]
        prompt = shared[: rng.choice([0, 17, 40])] + own
        params = SamplingParams(
            max_tokens=rng.randint(8, longest_answer),
            temperature=rng.choice([0.0, 0.8, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=2 if index % 4 == 0 else None,
        )
        request = Request(f"r{index}", prompt, params, 0.0, seed=index)
        if index == count - 1:  # a second sample of the prompt before it
            assert leader is not None
            request = Request(
                f"r{index}",
                leader.prompt_token_ids,
                leader.params,
                0.0,
                seed=leader.seed,
                sample_index=1,
                fork_of=leader,
            )
        leader = request
        requests.append(request)
    return requests


@pytest.fixture(scope="module")
def alone(bench, run_all):
    """The answers when every request runs by itself, with nothing cached."""
    engine = bench.engine(prefix_caching=False)
    answers, steps = run_all(engine, make_requests(bench.config.vocab_size), together=False)
    assert all(step.batch.num_seqs == 1 for step in steps)
    return answers


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same_to_the_last_bit(bench, run_all, alone, name):
    variant = VARIANTS[name]
    engine = bench.engine(**variant)
    answers, steps = run_all(engine, make_requests(bench.config.vocab_size))
    assert answers == alone
    assert max(step.batch.num_seqs for step in steps) > 1 or "budget 1" in name
    if "tiny pool" in name:
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("caching", [False, True])
def test_preemption_every_third_step_changes_nothing(bench, run_all, alone, caching):
    engine = bench.engine(prefix_caching=caching)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert answers == alone
    assert engine.scheduler.num_preemptions > 5


def test_the_order_of_arrival_does_not_matter(bench, run_all, alone):
    requests = make_requests(bench.config.vocab_size)
    leader_and_fork = requests[-2:]
    shuffled = requests[:-2]
    random.Random(1).shuffle(shuffled)
    answers, _ = run_all(bench.engine(), leader_and_fork + shuffled)
    assert answers == alone


def test_a_warm_cache_changes_nothing(bench, run_all, alone):
    engine = bench.engine()
    run_all(engine, make_requests(bench.config.vocab_size))
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert answers == alone
    assert engine.scheduler.prefix_tokens_hit > 0


def test_the_requests_do_differ(alone):
    texts = {tuple(tokens) for tokens, _ in alone.values()}
    assert len(texts) >= len(alone) - 1


# -- a real model ---------------------------------------------------------------------------------

REAL_LIMITS = {"max_model_len": 110}


def make_real_requests(bench) -> list[Request]:
    return make_requests(bench.config.vocab_size, count=5, most=60, longest_answer=12)


@pytest.fixture(scope="module")
def real_bench(load_bench, smollm2_gguf):
    with dequantized_once():
        yield load_bench(smollm2_gguf)


@pytest.fixture(scope="module")
def real_alone(real_bench, run_all):
    engine = real_bench.engine(prefix_caching=False, **REAL_LIMITS)
    return run_all(engine, make_real_requests(real_bench), together=False)[0]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    "variant",
    [
        {"block_size": 1, "num_blocks": 512, "max_num_batched_tokens": 33},
        {"block_size": 4, "num_blocks": 30, "prefix_caching": False},
        {"block_size": 32, "num_blocks": 16, "max_num_batched_tokens": 64},
    ],
)
def test_a_real_model_too(real_bench, real_alone, run_all, variant):
    engine = real_bench.engine(**REAL_LIMITS, **variant)
    answers, _ = run_all(engine, make_real_requests(real_bench))
    assert answers == real_alone
    if variant["num_blocks"] == 30:
        assert engine.scheduler.num_preemptions > 0
