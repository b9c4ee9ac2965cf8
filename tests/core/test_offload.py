"""An engine with a store behind its pool: what is computed again, and what is not."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hash_model import expected_tokens
from kv_storages import SlowStorage

from octavo.core.sampling_params import SamplingParams


def storage_of(**how):
    return partial(SlowStorage, rng=random.Random(0), **how)


def computed(engine) -> tuple[int, list[list[int]]]:
    """Run to the end: tokens that steps computed, and the answers as they ended."""
    count, answers = 0, []
    while engine.has_unfinished_requests:
        step = engine.step()
        engine.check_integrity()
        if step is None:
            continue
        count += step.batch.num_tokens
        answers += [u.request.output_token_ids for u in step.updates if u.request.is_finished]
    return count, answers


def engine_that_stored(prompt, make_engine, make_request, **how):
    """One that finds the blocks of a prompt in a storage, where another has left them."""
    first = make_engine(8, 4, num_places=20, make_storage=storage_of())
    first.add(make_request("first", prompt))
    computed(first)
    while first.save():
        pass
    engine = make_engine(8, 4, num_places=20, make_storage=storage_of(**how))
    storages = [each.scheduler.block_manager.store._storage for each in (first, engine)]
    storages[1].contents.update(storages[0].contents)
    return engine, storages[1]


def fill_pool(engine, make_request) -> None:
    """Have every cached block evicted."""
    engine.add(make_request("filler", [50 + i % 40 for i in range(31)], max_tokens=1))
    computed(engine)


PROMPT = list(range(17))


@pytest.mark.parametrize("make_storage", [None, storage_of(), storage_of(delay=5)])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_evicted_prefix_comes_back(make_engine, make_request, make_storage, depth):
    engine = make_engine(8, 4, num_places=20, make_storage=make_storage, depth=depth)
    engine.add(make_request("a", PROMPT))
    num_cold, (answer,) = computed(engine)
    fill_pool(engine, make_request)
    again = make_request("b", PROMPT)
    engine.add(again)
    num_warm, (same,) = computed(engine)
    assert same == answer == expected_tokens(PROMPT, 4, 97)
    assert again.stats.num_cached_tokens == 16 and num_cold - num_warm == 16
    stats = engine.stats()
    assert stats.kv_blocks_restored == 4 and stats.kv_bytes_restored == 400
    assert stats.prefix_tokens_from_memory + stats.prefix_tokens_from_disk == 16
    assert stats.prefix_tokens_hit == 16


@pytest.mark.parametrize("make_storage", [None, storage_of(delay=5)])
@pytest.mark.parametrize(("windows", "num_restored"), [((6,), 2), ((None, 6), 4 + 2)])
def test_of_windows_comes_back_what_they_see(
    make_engine, make_request, make_storage, windows, num_restored
):
    """After 16 tokens a window of 6 sees 5 of them, in two blocks."""
    how = {"windows": windows, "max_num_batched_tokens": 8, "max_model_len": 32}
    engine = make_engine(8 * len(windows), 4, num_places=40, make_storage=make_storage, **how)
    engine.add(make_request("a", PROMPT))
    _, (answer,) = computed(engine)
    for first in (40, 60):
        engine.add(make_request("filler", [first + i % 40 for i in range(28)], max_tokens=1))
        computed(engine)
    again = make_request("b", PROMPT)
    engine.add(again)
    _, (same,) = computed(engine)
    assert same == answer == expected_tokens(PROMPT, 4, 97, windows)
    assert again.stats.num_cached_tokens == 16
    stats = engine.stats()
    assert stats.kv_blocks_restored == num_restored
    assert stats.prefix_tokens_from_memory + stats.prefix_tokens_from_disk == 16


def test_who_has_a_sight_gets_what_it_sees_all_of(make_engine, make_request):
    engine = make_engine(8, 4, num_places=20)
    engine.add(make_request("a", PROMPT))
    computed(engine)
    fill_pool(engine, make_request)
    sees = SamplingParams(max_tokens=4, ignore_eos=True, attention_sinks=2, window=11)
    again = make_request("b", PROMPT, params=sees)
    engine.add(again)
    _, (answer,) = computed(engine)
    assert again.stats.num_cached_tokens == 12  # of 13
    assert answer == expected_tokens(PROMPT, 4, 97, sink_window=again.sink_window)


def test_without_a_store_it_is_computed_again(make_engine, make_request):
    engine = make_engine(8, 4)
    for name in ("a", "b"):
        engine.add(make_request(name, PROMPT))
        count, _ = computed(engine)
        assert count == 20
        fill_pool(engine, make_request)


def test_who_was_preempted_goes_on_from_the_store(make_engine, make_request):
    """Two requests of 8 blocks in a pool of 10: the later one gives way, and loses little."""
    counts = []
    for num_places in (0, 20):
        engine = make_engine(10, 2, num_places=num_places, max_num_batched_tokens=32)
        prompts = [list(range(8)), list(range(30, 38))]
        for name, prompt in zip("ab", prompts, strict=True):
            engine.add(make_request(name, prompt, max_tokens=8))
        count, answers = computed(engine)
        assert engine.scheduler.num_preemptions >= 1
        assert answers == [expected_tokens(prompt, 8, 97) for prompt in prompts]
        counts.append(count)
    assert counts[1] < counts[0]


def test_a_request_that_waits_holds_up_nobody(make_engine, make_request):
    engine, storage = engine_that_stored(PROMPT, make_engine, make_request, delay=10**6)
    waits = make_request("waits", PROMPT)
    engine.add(waits)
    engine.add(make_request("goes", [3, 4, 5], max_tokens=2))
    for _ in range(2):
        updates = engine.step().updates
    assert [update.request.request_id for update in updates] == ["goes"]
    assert updates[0].request.is_finished and not waits.block_ids
    storage.is_stuck = True  # when it has waited for too long, it goes too
    count, (answer,) = computed(engine)
    assert count == 20 and answer == expected_tokens(PROMPT, 4, 97)


def test_when_all_wait_the_engine_does_not_spin_or_end(make_engine, make_request):
    engine, _ = engine_that_stored(PROMPT, make_engine, make_request, delay=4)
    again = make_request("b", PROMPT)
    engine.add(again)
    assert engine.step() is None and engine.has_unfinished_requests
    _, (answer,) = computed(engine)
    assert answer == expected_tokens(PROMPT, 4, 97) and again.stats.num_cached_tokens == 16


def test_what_was_never_evicted_is_saved_while_nothing_runs(make_engine, make_request):
    engine = make_engine(32, 4, num_places=3, make_storage=storage_of())
    engine.add(make_request("a", PROMPT))
    assert not engine.save()  # somebody is waiting
    computed(engine)
    while engine.save():
        pass
    assert len(engine.scheduler.block_manager.store._storage.contents) == 5
    assert not engine.save() and engine.scheduler.block_manager.num_cached_blocks == 5


def test_the_end_of_an_engine_saves_what_it_has(make_engine, make_request):
    engine = make_engine(32, 4, num_places=3, make_storage=storage_of())
    engine.add(make_request("a", PROMPT))
    computed(engine)
    storage = engine.scheduler.block_manager.store._storage
    engine.close()
    assert len(storage.contents) == 5 and storage.is_closed


def test_memory_alone_is_not_filled_ahead(make_engine, make_request):
    engine = make_engine(32, 4, num_places=3)
    engine.add(make_request("a", PROMPT))
    computed(engine)
    assert not engine.save() and engine.stats().kv_blocks_stored == 0


def test_samples_share_what_came_back(make_engine, make_request):
    engine = make_engine(16, 4, num_places=20)
    engine.add(make_request("a", PROMPT))
    computed(engine)
    engine.add(make_request("filler", [50 + i % 40 for i in range(60)], max_tokens=1))
    computed(engine)
    leader = make_request("b0", PROMPT)
    engine.add(leader)
    engine.add(make_request("b1", PROMPT, fork_of=leader))
    _, answers = computed(engine)
    assert answers == [expected_tokens(PROMPT, 4, 97)] * 2
    assert engine.stats().kv_blocks_restored == 3  # once, and one had not left the pool


def test_samples_wait_for_blocks_that_come_back_while_another_publishes_the_same(
    make_engine, make_request
):
    engine = make_engine(16, 4, num_places=40)
    engine.add(make_request("a", PROMPT))
    computed(engine)
    for first in (40, 60):
        engine.add(make_request("filler", [first + i % 40 for i in range(60)], max_tokens=1))
        computed(engine)
    leader = make_request("b0", PROMPT, max_tokens=8)
    for request in (
        make_request("first", PROMPT, max_tokens=8),
        leader,
        make_request("b1", PROMPT, max_tokens=8, fork_of=leader),
    ):
        engine.add(request)
    _, answers = computed(engine)
    assert answers == [expected_tokens(PROMPT, 8, 97)] * 3


def test_prompts_whose_positions_are_all_reported_are_computed(make_engine, make_request):
    engine = make_engine(8, 4, num_places=20)
    engine.add(make_request("a", PROMPT))
    computed(engine)
    fill_pool(engine, make_request)
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    engine.add(make_request("b", PROMPT, params=params))
    count, _ = computed(engine)
    assert count == 20 and engine.stats().kv_blocks_restored == 0
