"""Engines whose ranks add up their results, on the GPU's path with plain ops: nearly the answers of
one rank, and with canonical sums to the bit."""

from __future__ import annotations

import pytest
from native_requests import make_requests

from octavo.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

VARIANTS = {
    "two ranks": {"tp": 2},
    "four ranks": {"tp": 4},
    "budget 7": {"tp": 2, "max_num_batched_tokens": 7},
    "int8 KV": {"tp": 2, "kv_cache_dtype": "int8"},
    "tiny pool": {"tp": 2, "num_blocks": 10},
    "tiny pool, host cache": {"tp": 2, "num_blocks": 10, "num_places": 30},
}


@pytest.fixture(scope="module")
def alone(bench, run_all):
    """The answers of one rank when every request runs by itself, by the type of its KV."""

    def answers(kind):
        engine = bench.engine(
            kernels="fused", batch_invariant=True, prefix_caching=False, kv_cache_dtype=kind
        )
        return run_all(engine, make_requests(bench.config.vocab_size), together=False)[0]

    return {kind: answers(kind) for kind in ("auto", "int8")}


@pytest.mark.parametrize("name", VARIANTS)
def test_canonical_answers_are_those_of_one_rank(bench, run_all, alone, name):
    settings = VARIANTS[name]
    engine = bench.engine(kernels="fused", batch_invariant=True, **settings)
    answers, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert engine.executor.failures_of_followers == []
    assert answers == alone[settings.get("kv_cache_dtype", "auto")]
    if "tiny pool" in name:
        assert engine.scheduler.num_preemptions > 0
    if "host cache" in name:
        assert (engine.stats().kv_blocks_restored or 0) > 0
