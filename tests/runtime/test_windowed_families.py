"""Families whose layers have windows answer the same from a pool that is far too small for all."""

from __future__ import annotations

import random

import pytest
from tiny_transformers import make_model

from octavo.core.kv_tables import most_blocks
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cpu import library
from octavo.models.kv_groups import group_layers

NAMES = ["gemma2", "gemma3", "gpt-oss", "cohere2"]
KERNELS = [
    "reference",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    ),
]
CHUNK = 24


@pytest.fixture(scope="module", params=NAMES)
def bench(request, load_bench, tmp_path_factory):
    folder = tmp_path_factory.mktemp("families") / request.param
    make_model(request.param).save_pretrained(folder)
    return load_bench(folder)


@pytest.fixture(scope="module", params=KERNELS)
def wanted(request, bench, run_all):
    """The kernels, and the answers with one table for all layers, one after the other."""
    engine = bench.engine(prefix_caching=False, kernels=request.param)
    requests = make_requests(bench.config.vocab_size)
    return request.param, run_all(engine, requests, together=False)[0]


def make_requests(vocab_size: int) -> list[Request]:
    """Prompts that begin alike, longer than the windows."""
    rng = random.Random(5)
    shared = [rng.randrange(2, vocab_size) for _ in range(32)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0)
    return [
        Request(
            f"r{index}",
            shared[: 16 * (index % 3)] + [rng.randrange(2, vocab_size) for _ in range(20)],
            params,
            0.0,
        )
        for index in range(5)
    ]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("num_places", [0, 80])
def test_who_was_preempted_goes_on_as_if_nothing_had_been(bench, run_all, wanted, num_places):
    kernels, answers = wanted
    groups = group_layers(bench.config.kv_layers)
    assert groups.num_groups > 1
    engine = bench.engine(
        most_blocks(groups.windows, 68, 16, CHUNK),  # of the longest request, and hardly more
        kernels=kernels,
        groups=groups,
        max_num_batched_tokens=CHUNK,
        num_places=num_places,
    )
    again, _ = run_all(engine, make_requests(bench.config.vocab_size))
    assert again == answers
    assert engine.scheduler.num_preemptions > 0
    assert bool(engine.stats().kv_blocks_restored) == (num_places > 0)
