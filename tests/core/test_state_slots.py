from __future__ import annotations

import pytest
from hash_model import expected_tokens

from octavo.base.errors import ConfigError
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.state_slots import StateSlots
from octavo.core.state_types import NO_STATE


def items_of(engine):
    """Those of the next step."""
    engine.begin_step()
    return engine._submitted[-1].batch.items


def test_a_step_reads_what_the_one_before_has_written_and_writes_another(make_engine, make_request):
    engine = make_engine(state_slots=8)
    engine.add(make_request("a", [1, 2, 3], max_tokens=3))
    before = NO_STATE
    for _ in range(3):
        (item,) = items_of(engine)
        assert item.states.source == before
        assert item.states.target != before
        before = item.states.target
        engine.finish_step()


def test_steps_in_flight_follow_each_other_in_slots_of_their_own(make_engine, make_request):
    engine = make_engine(state_slots=8, depth=3)
    engine.add(make_request("a", [1, 2, 3], max_tokens=6))
    steps = [items_of(engine)[0].states for _ in range(3)]
    assert [step.source for step in steps] == [NO_STATE, steps[0].target, steps[1].target]
    assert len({step.target for step in steps}) == 3


def test_who_has_no_slot_waits(make_engine, make_request, run):
    engine = make_engine(state_slots=5)  # two for each
    for name in "abc":
        engine.add(make_request(name, [ord(name)] * 5))
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a", "b"]
    assert len(run(engine)) == 3


@pytest.mark.parametrize(("length", "hit"), [(9, 8), (8, 4), (5, 4), (4, 0), (23, 20)])
def test_a_prompt_is_hit_up_to_its_last_whole_block(make_engine, make_request, run, length, hit):
    engine = make_engine(state_slots=8, snapshot_tokens=1000)
    prompt = list(range(length))
    for name in "ab":
        engine.add(make_request(name, prompt))
        (request,) = run(engine)
        assert request.output_token_ids == expected_tokens(prompt, 4, 97, has_states=True)
    assert request.stats.num_cached_tokens == hit


def test_a_longer_prompt_is_hit_at_the_last_snapshot_that_it_shares(make_engine, make_request, run):
    engine = make_engine(state_slots=16, snapshot_tokens=8)
    prompt = list(range(30))
    engine.add(make_request("a", prompt))
    run(engine)
    engine.add(make_request("b", [*prompt[:22], 7, 7, 7]))  # 20 are in whole blocks
    (request,) = run(engine)
    assert request.stats.num_cached_tokens == 16


@pytest.mark.parametrize("how", [{}, {"depth": 2}, {"max_multi_steps": 8}, {"max_num_seqs": 1}])
@pytest.mark.parametrize("snapshot_tokens", [8, 1000])
def test_an_answer_is_hit_by_the_next_turn(make_engine, make_request, run, how, snapshot_tokens):
    engine = make_engine(state_slots=16, snapshot_tokens=snapshot_tokens, **how)
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    (first,) = run(engine)
    prompt = [*first.token_ids, 5]  # 22 of these 24 were computed
    engine.add(make_request("b", prompt))
    num_computed = 0
    while engine.has_unfinished_requests:
        step = engine.step()
        num_computed += sum(item.num_tokens for item in step.batch.items)
        engine.check_integrity()
    (second,) = [u.request for u in step.updates]
    assert second.stats.num_cached_tokens == 20
    assert second.output_token_ids == expected_tokens(prompt, 4, 97, has_states=True)
    assert num_computed <= 4 + 4  # four tokens of the prompt, and those of the answer


def test_of_an_answer_only_the_last_two_snapshots_are_kept(make_engine, make_request, run):
    """Beside that of the prompt, and those at intervals."""
    engine = make_engine(state_slots=32, snapshot_tokens=16)
    engine.add(make_request("a", list(range(9)), max_tokens=30))
    run(engine)
    states = engine.scheduler.block_manager.states
    assert states.num_cached == 5  # after 8, 16, 32 tokens; 28 and 36


@pytest.mark.parametrize("num_cut", [1, 2, 3, 4])
def test_an_answer_is_hit_whose_end_is_in_other_tokens(make_engine, make_request, run, num_cut):
    engine = make_engine(state_slots=16, snapshot_tokens=1000)
    engine.add(make_request("a", [1, 2, 3], max_tokens=22))  # 24 are computed
    (first,) = run(engine)
    engine.add(make_request("b", [*first.token_ids[: 24 - num_cut], 90, 91, 92, 93, 94]))
    (second,) = run(engine)
    assert second.stats.num_cached_tokens == 20


def test_many_answers_keep_a_snapshot_each(make_engine, make_request, run):
    """Where slots are few, those of old ones make room, and nobody waits for that."""
    engine = make_engine(state_slots=8, snapshot_tokens=1000, max_num_seqs=2, num_blocks=64)
    for name in range(6):
        engine.add(make_request(f"r{name}", [name] * 5, max_tokens=12))
    finished = run(engine)
    assert len(finished) == 6
    last = finished[-1]
    engine.add(make_request("again", [*last.token_ids, 7]))
    (again,) = run(engine)
    assert again.stats.num_cached_tokens == 16


def test_an_answer_that_is_computed_again_is_not_cut_at_each_block(make_engine, make_request, run):
    engine = make_engine(state_slots=8, snapshot_tokens=1000, prefix_caching=True)
    request = make_request("a", list(range(5)), max_tokens=24)
    engine.add(request)
    while len(request.token_ids) < 23:
        engine.step()
    engine.scheduler.retract(request)
    blocks = engine.scheduler.block_manager
    while blocks.states.num_cached:  # as if it had been evicted
        slot = next(s for s in blocks.states._idle if blocks.prefix_cache.has_state(s))
        blocks.prefix_cache.forget_state(slot)
        blocks.states.drop(slot)
    chunks = []
    while step := engine.step():
        chunks += [item.num_tokens for item in step.batch.items]
    assert chunks[:3] == [4, 16, 3]
    assert request.output_token_ids == expected_tokens(range(5), 24, 97, has_states=True)


def test_blocks_without_a_snapshot_are_no_prefix():
    cache = RadixPrefixCache(2, needs_states=True)
    cache.publish(None, [(1, 2), (3, 4)], [[7], [8]], "")
    assert cache.match([1, 2, 3, 4], 4, "") == []
    assert cache.keep_state(7, 0)
    assert not cache.keep_state(7, 1)
    assert cache.match([1, 2, 3, 4], 4, "") == [[7]]
    assert cache.keep_state(8, 1)
    assert cache.match([1, 2, 3, 4], 4, "") == [[7], [8]]


def test_a_snapshot_goes_with_its_block():
    cache = RadixPrefixCache(2, needs_states=True)
    cache.publish(None, [(1, 2)], [[7]], "")
    cache.keep_state(7, 3)
    assert cache.forget(7) == 3
    assert not cache.has_state(3)


def test_the_oldest_snapshot_goes_first(make_engine, make_request, run):
    engine = make_engine(state_slots=4, snapshot_tokens=1000)  # two of a request, and two more
    prompts = {name: [ord(name)] * 9 for name in "abc"}
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt, max_tokens=3))  # no block of theirs becomes full
        run(engine)
    hits = {}
    for name in "cba":
        engine.add(make_request(f"{name} again", prompts[name], max_tokens=3))
        (request,) = run(engine)
        hits[name] = request.stats.num_cached_tokens
    assert hits["c"] == hits["b"] == 8
    assert hits["a"] == 0


def test_samples_of_a_prompt_share_it_up_to_its_snapshot(make_engine, make_request, run):
    engine = make_engine(state_slots=16, snapshot_tokens=1000)
    prompt = list(range(10))
    first = make_request("a", prompt)
    others = [make_request(name, prompt, fork_of=first) for name in "bc"]
    for request in (first, *others):
        engine.add(request)
    run(engine)
    assert [request.stats.num_cached_tokens for request in (first, *others)] == [0, 8, 8]
    expected = expected_tokens(prompt, 4, 97, has_states=True)
    assert all(request.output_token_ids == expected for request in (first, *others))


def test_multi_step_stops_where_a_snapshot_is_wanted(make_engine, make_request, run):
    engine = make_engine(state_slots=8, snapshot_tokens=8, max_multi_steps=8)
    engine.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=20))
    ends = []
    while step := engine.step():
        ends.append(step.batch.items[0].request.num_computed_tokens or None)
    assert {8, 16} <= set(ends)


def test_fewer_slots_than_a_request_needs_are_refused():
    with pytest.raises(ConfigError, match="2 slots for states are too few: 3 serve one request"):
        StateSlots(2, 4, NoPrefixCache())
