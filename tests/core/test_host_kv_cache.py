from __future__ import annotations

import random

import pytest
from kv_storages import SlowStorage

from octavo.core.block_store import NOTHING_STORED, BlockPart, Stored, keys_of, next_key, root_key
from octavo.core.host_kv_cache import HostKVCache
from octavo.core.prefix_cache import RadixPrefixCache

SIZE = 2


@pytest.fixture
def request_of(make_request):
    def create(*tokens: int, salt: str = "", name: str = "r"):
        return make_request(name, [*tokens, 99], cache_salt=salt)

    return create


def make_host_cache(num_places: int = 3, storage=None, rule=None) -> HostKVCache:
    return HostKVCache(100, num_places, SIZE, 8, storage, rule)


def save(host: HostKVCache, *keys: bytes, are_done: bool = True) -> list[int | None]:
    """Offer blocks, and settle the step that copies them."""
    targets = [host.offer(0, lambda _, key=key: key) for key in keys]
    host.settle([(0, target) for target in targets if target is not None], are_done=are_done)
    assert host.violations() == []
    return targets


def keys(request, count: int = 2) -> tuple[bytes, ...]:
    return tuple(keys_of(request, count, SIZE))


def ask(host: HostKVCache, request):
    """The blocks that the host KV cache holds for a pool that holds none."""
    found = host.ask(request, [], 0, len(request.token_ids) - 1)
    assert host.violations() == []
    return found


def keys_in(found: Stored) -> tuple[bytes, ...]:
    return tuple(part.key for part in found.parts)


def take(host: HostKVCache, *keys: bytes) -> list[int]:
    return host.take(Stored(SIZE * len(keys), [BlockPart(0, i, key) for i, key in enumerate(keys)]))


def test_keys_are_of_all_tokens_and_of_the_salt(request_of):
    one, other = request_of(1, 2, 3, 4), request_of(9, 2, 3, 4)
    assert len({*keys(one), *keys(other), *keys(request_of(1, 2, 3, 4, salt="k"))}) == 6
    assert keys(one)[1] == next_key(next_key(root_key(""), [1, 2]), [3, 4])
    assert tuple(keys_of(one, 1, SIZE)) == keys(one)[:1]  # what it keeps is not cut


def test_the_trie_has_the_same_keys(request_of):
    request, cache = request_of(1, 2, 3, 4, salt="k"), RadixPrefixCache(SIZE)
    cache.publish(None, [(1, 2), (3, 4)], [[5], [6]], "k")
    assert (cache.key_of(6), cache.key_of(5)) == keys(request)[::-1]


def test_what_was_copied_is_there_when_its_step_has_ended(request_of):
    host, request = make_host_cache(), request_of(1, 2, 3, 4)
    target = host.offer(7, lambda block_id: keys(request)[0])
    assert target in range(100, 103) and not ask(host, request).parts
    host.settle([(7, target)], are_done=True)
    assert keys_in(ask(host, request)) == keys(request)[:1]
    assert take(host, keys(request)[0]) == [target]


def test_a_step_that_failed_has_stored_nothing(request_of):
    host, request = make_host_cache(), request_of(1, 2)
    save(host, keys(request, 1)[0], are_done=False)
    assert ask(host, request) == NOTHING_STORED and host.stats.num_stored == 0


def test_nothing_is_stored_twice():
    host = make_host_cache()
    assert save(host, b"a") != [None] and save(host, b"a") == [None]
    first = host.offer(0, lambda _: b"b")
    assert first is not None and host.offer(1, lambda _: b"b") is None  # while it is coming


def test_the_oldest_makes_room_and_what_is_used_does_not(request_of):
    host = make_host_cache(2)
    save(host, b"a", b"b")
    (place,) = take(host, b"a")  # a copy that is not settled reads it
    save(host, b"c")
    assert set(host._held) == {b"a", b"c"}
    take(host, b"c")
    assert save(host, b"d") == [None] and host.stats.num_dropped == 1
    host.settle([(place, 3)], are_done=True)
    assert save(host, b"d") == [place]


def test_tenants_share_nothing(request_of):
    host, mine = make_host_cache(), request_of(1, 2, salt="mine")
    save(host, *keys(mine, 1))
    assert ask(host, request_of(1, 2, salt="mine")).parts
    assert not ask(host, request_of(1, 2)).parts
    assert not ask(host, request_of(1, 2, salt="yours")).parts


class Rows(list):
    def __init__(self, count: int):
        super().__init__(bytearray(8) for _ in range(count))


def with_storage(num_places: int = 3, *, delay: int = 0, fails: float = 0.0, rule=None):
    storage = SlowStorage(Rows(num_places), random.Random(0), delay=delay, fails=fails)
    return make_host_cache(num_places, storage, rule), storage


def test_a_request_waits_for_what_is_read(request_of):
    host, storage = with_storage(delay=50)
    request = request_of(1, 2, 3, 4)
    storage.contents.update({key: bytes(8) for key in keys(request)})
    assert ask(host, request).is_awaited and host.wait(0)
    while (found := ask(host, request)).is_awaited:
        pass
    assert keys_in(found) == keys(request)
    take(host, *keys_in(found)[:1])
    assert (host.stats.tokens_from_storage, host.stats.tokens_from_memory) == (SIZE, 0)
    take(host, *keys_in(found)[:1])
    assert (host.stats.tokens_from_storage, host.stats.tokens_from_memory) == (SIZE, SIZE)


def test_what_cannot_be_read_is_not_waited_for_again(request_of):
    host, storage = with_storage(fails=1.0)
    request = request_of(1, 2, 3, 4)
    storage.contents.update({key: bytes(8) for key in keys(request)})
    assert ask(host, request).is_awaited
    assert ask(host, request) == NOTHING_STORED and host.stats.num_errors == 2


def test_no_request_waits_for_a_storage_that_is_stuck(request_of):
    host, storage = with_storage(delay=10**6)
    request = request_of(1, 2)
    storage.contents[keys(request, 1)[0]] = bytes(8)
    assert ask(host, request).is_awaited
    storage.is_stuck = True
    assert ask(host, request) == NOTHING_STORED and not host.saves_ahead
    late = request_of(1, 2, name="late")
    assert ask(host, late) == NOTHING_STORED and not late.awaited_keys


class Rule:
    def __init__(self, limit: float):
        self.limit = limit
        self.asked: list[tuple[int, int, float]] = []

    def is_worth(self, start: int, num_tokens: int, seconds: float) -> bool:
        self.asked.append((start, num_tokens, seconds))
        return seconds < self.limit


@pytest.mark.parametrize(("limit", "is_awaited"), [(3.0, True), (2.0, False)])
def test_what_is_sooner_computed_is_not_read(request_of, limit, is_awaited):
    """The first block is on the host, two more would have to be read, a second each."""
    rule = Rule(limit)
    host, storage = with_storage(rule=rule)
    storage.read_seconds = 1.0
    request = request_of(1, 2, 3, 4, 5, 6)
    first, *further = keys(request, 3)
    save(host, first)
    storage.contents.update({key: bytes(8) for key in further})
    found = ask(host, request)
    assert (found.is_awaited, rule.asked) == (is_awaited, [(2, 4, 2.0)])
    assert is_awaited or keys_in(found) == (first,)


def test_more_is_stored_than_the_host_cache_has_room_for(request_of):
    host, storage = with_storage(2)
    request = request_of(1, 2, 3, 4, 5, 6)
    storage.contents.update({key: bytes(8) for key in keys(request, 3)})
    assert ask(host, request).is_awaited
    assert keys_in(ask(host, request)) == keys(request)  # the first ones, and on it goes without


def test_what_makes_room_in_the_host_cache_is_read_again(request_of):
    host, storage = with_storage(1)
    first, second = request_of(1, 2), request_of(3, 4)
    save(host, *keys(first, 1))
    save(host, *keys(second, 1))
    assert len(storage.contents) == 2
    assert ask(host, first).is_awaited and keys_in(ask(host, first)) == keys(first, 1)


def test_idle_places_of_a_prefix_are_not_given_to_the_rest_of_it(request_of):
    host, storage = with_storage(2)
    request = request_of(1, 2, 3, 4, 5, 6)
    first, second, third = keys(request, 3)
    save(host, first)
    storage.contents.update({second: bytes(8), third: bytes(8)})
    assert ask(host, request).is_awaited
    assert keys_in(ask(host, request)) == (first, second)
