"""Tokens and log-probabilities do not depend on how a request was run, to the last bit.

Block size, token budget, the size of the pool (with preemptions), the prefix cache, the company in
a batch and the batching policy may change when something is computed, and never what comes out.
"""

from __future__ import annotations

import random

import pytest
from faults import FaultyScheduler, every
from paging_variants import VARIANTS, make_requests
from weights import dequantized_once

from octavo.core.request import Request


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
    if "host cache" in name:
        assert (engine.stats().kv_blocks_restored or 0) > 0


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
        {"block_size": 4, "num_blocks": 30, "prefix_caching": False},
        pytest.param(
            {"block_size": 1, "num_blocks": 512, "max_num_batched_tokens": 33},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"block_size": 32, "num_blocks": 16, "max_num_batched_tokens": 64},
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_real_model_too(real_bench, real_alone, run_all, variant):
    engine = real_bench.engine(**REAL_LIMITS, **variant)
    answers, _ = run_all(engine, make_real_requests(real_bench))
    assert answers == real_alone
    if variant["num_blocks"] == 30:
        assert engine.scheduler.num_preemptions > 0
