"""Requests that take no part in caches (``cache_prompt=False``): what they find and leave."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hash_model import expected_tokens
from kv_storages import SlowStorage

from octavo.base.errors import InvalidRequestError
from octavo.core.sampling_params import SamplingParams

PROMPT = list(range(18))
UNCACHED = SamplingParams(max_tokens=6, ignore_eos=True, cache_prompt=False)
WAYS = {
    "one table": {},
    "two steps in flight": {"depth": 2},
    "windows": {"windows": (None, 6)},
    "states": {"state_slots": 9},
}


def blocks_of(engine):
    return engine.scheduler.block_manager


@pytest.mark.parametrize("way", WAYS)
def test_it_leaves_nothing(make_engine, make_request, run, way):
    engine = make_engine(**WAYS[way])
    for name in "ab":
        request = make_request(name, PROMPT, params=UNCACHED)
        engine.add(request)
        assert run(engine) == [request]
        windows = WAYS[way].get("windows", (None,))
        expected = expected_tokens(PROMPT, 6, 97, windows, has_states=way == "states")
        assert request.output_token_ids == expected
        assert request.stats.num_cached_tokens == 0 and request.stats.miss_reason == "off"
        assert blocks_of(engine).num_free_blocks == 32 and len(blocks_of(engine).prefix_cache) == 0
        if way == "states":
            assert blocks_of(engine).states.num_used == blocks_of(engine).states.num_cached == 0


@pytest.mark.parametrize("way", WAYS)
def test_it_takes_nothing_and_others_find_what_was_there(make_engine, make_request, run, way):
    engine = make_engine(**WAYS[way])
    engine.add(make_request("a", PROMPT))
    run(engine)
    num_known = len(blocks_of(engine).prefix_cache)
    requests = [make_request("b", PROMPT, params=UNCACHED), make_request("c", PROMPT)]
    for request in requests:
        engine.add(request)
        run(engine)
    assert [r.stats.num_cached_tokens for r in requests] == [0, 16]
    assert len(blocks_of(engine).prefix_cache) == num_known > 0


def test_nothing_is_stored(make_engine, make_request, run):
    """Neither what makes room, nor what is saved while nothing runs."""
    engine = make_engine(8, num_places=20, make_storage=partial(SlowStorage, rng=random.Random(0)))
    for index in range(4):  # the pool has room for one
        prompt = [index * 20 + token for token in PROMPT]
        engine.add(make_request(f"r{index}", prompt, params=UNCACHED))
        run(engine)
        while engine.save():
            pass
    stats = engine.stats()
    assert (stats.kv_blocks_stored, stats.kv_blocks_written, stats.kv_blocks_dropped) == (0, 0, 0)


def test_samples_share_the_prompt_all_the_same(make_engine, make_request, run):
    engine = make_engine()
    first = make_request("a", PROMPT, params=UNCACHED)
    second = make_request("b", PROMPT, params=UNCACHED, fork_of=first)
    for request in (first, second):
        engine.add(request)
    run(engine)
    assert (first.stats.num_cached_tokens, second.stats.num_cached_tokens) == (0, 17)
    assert blocks_of(engine).num_free_blocks == 32


def test_after_a_preemption_all_is_computed_again(make_engine, make_request, run):
    engine = make_engine(num_blocks=8, block_size=2)
    params = UNCACHED.with_changes(max_tokens=8)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    requests = [make_request(f"r{i}", p, params=params) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    run(engine)
    assert engine.scheduler.num_preemptions
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == expected_tokens(prompt, 8, 97)
    assert blocks_of(engine).num_free_blocks == 8


def test_it_is_true_or_false():
    with pytest.raises(InvalidRequestError, match="must be True or False") as caught:
        SamplingParams(cache_prompt=1)
    assert caught.value.field == "cache_prompt"
