"""Pools of ranks with requests of their own: which one a request goes to, and what it finds."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from octavo.base.errors import EngineError
from octavo.core.block_audit import IdleAudit
from octavo.core.block_pools import BlockPools
from octavo.core.engine_snapshot import pool_map
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import RequestStatus

SIZE = 4


def make_pools(num_pools=2, each=8):
    cache = partial(RadixPrefixCache, SIZE)
    return BlockPools(num_pools, num_pools * each, SIZE, cache)


def cached_in(pools):
    return lambda request: pools.match(request, len(request.token_ids) - 1)


def admitted(pools, running, request):
    """Admit a request beside those that run, and compute its prompt."""
    shared = pools.place(request, running, cached_in(pools))
    num_tokens = len(request.token_ids)
    assert pools.admit(request, shared, num_tokens, pools.headroom(request, running))
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = num_tokens
    pools.commit(request)
    running.append(request)
    return request


def test_requests_go_where_least_is_held(make_request):
    pools, running = make_pools(3), []
    first = admitted(pools, running, make_request("long", list(range(12))))
    others = [admitted(pools, running, make_request(f"r{i}", [i, i])) for i in range(4)]
    assert first.pool == 0
    assert [request.pool for request in others] == [1, 2, 1, 2]
    pools.check_integrity(running)


def test_all_blocks_of_a_request_are_in_its_pool(make_request):
    pools, running = make_pools(), []
    for index, name in enumerate("ab"):
        admitted(pools, running, make_request(name, [index] * 9))
    first, second = running
    assert (first.pool, second.pool) == (0, 1)
    assert max(first.block_ids) < 8 <= min(second.block_ids)
    assert pools.allocate(second, 30)
    assert 8 <= min(second.block_ids) <= max(second.block_ids) < 16
    assert not pools.allocate(second, 33)  # though the other pool has room
    assert pools.num_used_blocks == 3 + 8


def test_a_prefix_draws_requests_until_there_are_too_many_of_them(make_request):
    pools, running = make_pools(each=64), []
    prefix = list(range(24))
    for index in range(12):
        admitted(pools, running, make_request(f"r{index}", [*prefix, 50 + index]))
        counts = Counter(request.pool for request in running)
        assert max(counts.values()) <= 1.25 * len(running) / 2 + 1
    assert [request.pool for request in running[:3]] == [0, 0, 1]
    assert running[1].block_ids[:6] == running[0].block_ids[:6]
    elsewhere = [request for request in running if request.pool == 1]
    assert min(elsewhere[0].block_ids) >= 64  # its own copy, computed again
    assert elsewhere[1].block_ids[:6] == elsewhere[0].block_ids[:6]


def test_of_pools_one_that_has_room_is_chosen(make_request):
    """Also where it has nothing of the prompt, and more requests."""
    pools, running = make_pools(each=12), []
    found = admitted(pools, running, make_request("a", list(range(20))))
    assert pools.allocate(found, 48)
    for index in range(2):
        admitted(pools, running, make_request(f"b{index}", [99 - index] * 3))
    later = admitted(pools, running, make_request("c", [*range(20), 7]))
    assert [request.pool for request in running] == [0, 1, 1, 1]
    assert later.num_published_blocks == 5
    pools.check_integrity(running)


def test_samples_go_to_their_prompt_if_there_is_room(make_request):
    pools, running = make_pools(each=16), []
    source = admitted(pools, running, make_request("s", list(range(16))))
    for index in range(4):
        sample = make_request(f"t{index}", list(range(16)), fork_of=source)
        assert admitted(pools, running, sample).pool == 0
    assert pools.allocate(source, 4 * (16 - 4))
    last = make_request("u", list(range(16)), fork_of=source)
    assert admitted(pools, running, last).pool == 1


def test_counts_audit_and_picture_are_of_all_pools(make_request):
    pools, requests = make_pools(), []
    for index, name in enumerate("ab"):
        admitted(pools, requests, make_request(name, [index] * 9))
    assert pools.num_blocks == 16
    assert pools.num_used_blocks == 6
    assert pools.waste(requests) == pytest.approx(6 / 24)
    picture = pool_map(pools, requests)
    assert picture["runs"][1::2] == [3, 5, 3, 5]
    assert [part[1] for part in pools.prefix_cache.largest_parts(5)] == [2, 2]
    for request in requests:
        pools.free(request)
    assert pools.num_cached_blocks == 4
    assert pools.num_free_blocks == 12
    audit = IdleAudit(pools)
    assert audit.advance() == []
    assert audit.is_done
    pools.ref_counts[12] = 1
    audit.restart()
    assert "block 12 first" in audit.advance()[0]


def test_damage_is_named_by_its_pool(make_request):
    pools = make_pools()
    request = admitted(pools, [], make_request("a", [1] * 9))
    request.block_ids[0] = 9  # of the other pool
    with pytest.raises(EngineError, match="pool 0: .* reference counts"):
        pools.check_integrity([request])


def test_items_of_a_step_are_in_the_order_of_pools(make_engine, make_request):
    engine = make_engine(16, SIZE, num_pools=3)
    for index in range(7):
        engine.add(make_request(f"r{index}", [index + 1] * 5, max_tokens=8))
    seen = set()
    while (step := engine.step()) is not None:
        pools = [item.request.pool for item in step.batch.items]
        assert pools == sorted(pools)
        seen.update(pools)
    assert seen == {0, 1, 2}


def test_preemption_takes_blocks_of_the_same_pool(make_engine, make_request):
    """Two fill the first pool: the later one loses its blocks, and not the one beside them."""
    engine = make_engine(6, SIZE, num_pools=2, max_model_len=24, prefix_caching=False)
    pools = engine.scheduler.block_manager
    chosen = {"a": 0, "b": 1, "c": 0}

    def place(request, running, shared_of):
        request.pool = chosen[request.request_id]
        return shared_of(request)

    pools.place = place
    for name in chosen:
        engine.add(make_request(name, [ord(name)] * 8, max_tokens=14))
    preempted = set()
    while (step := engine.step()) is not None:
        preempted.update(step.batch.preempted_ids)
    assert preempted == {"c"}


def test_the_capacity_is_that_of_all_pools(make_engine, make_request):
    """Twice as many requests of a length run at once as in one pool of that size."""
    counts = []
    for num_pools in (1, 2, 4):
        engine = make_engine(9, SIZE, num_pools=num_pools, max_model_len=12, prefix_caching=False)
        for index in range(16):
            engine.add(make_request(f"r{index}", [index + 1] * 8, max_tokens=4))
        most = 0
        while engine.step() is not None:
            most = max(most, len(engine.scheduler.running))
        counts.append(most)
    assert counts[1:] == [2 * counts[0], 4 * counts[0]]
