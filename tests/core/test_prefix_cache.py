from __future__ import annotations

from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache


class CollidingToken(int):
    """A token id whose hash has a single bit: nearly all blocks collide."""

    def __hash__(self) -> int:
        return int(self) & 1


def publish_chain(cache: RadixPrefixCache, tokens: list[int], blocks: list[int], salt: str = ""):
    size = cache.block_size
    edges = [tuple(tokens[i * size : (i + 1) * size]) for i in range(len(blocks))]
    return cache.publish(None, edges, [[block] for block in blocks], salt)


def test_longest_prefix_of_whole_blocks_matches():
    cache = RadixPrefixCache(2)
    publish_chain(cache, [1, 2, 3, 4], [7, 8])
    assert cache.match([1, 2, 3, 4, 5], 5, "") == [[7], [8]]
    assert cache.match([1, 2, 3, 9], 4, "") == [[7]]
    assert cache.match([9, 2, 3, 4], 4, "") == []
    assert cache.match([3, 4], 2, "") == []


def test_limit_cuts_the_match_to_whole_blocks():
    cache = RadixPrefixCache(2)
    publish_chain(cache, [1, 2, 3, 4], [7, 8])
    assert cache.match([1, 2, 3, 4], 3, "") == [[7]]
    assert cache.match([1, 2, 3, 4], 0, "") == []


def test_known_content_keeps_its_block():
    cache = RadixPrefixCache(2)
    publish_chain(cache, [1, 2], [7])
    assert cache.publish(None, [(1, 2)], [[9]], "") == [[7]]
    assert 9 not in cache


def test_salts_share_nothing():
    cache = RadixPrefixCache(2)
    publish_chain(cache, [1, 2], [7], salt="alice")
    assert cache.match([1, 2], 2, "bob") == []
    assert cache.match([1, 2], 2, "") == []
    assert cache.match([1, 2], 2, "alice") == [[7]]


def test_what_follows_a_forgotten_block_waits_until_it_is_back():
    cache = RadixPrefixCache(2)
    publish_chain(cache, [1, 2, 3, 4], [7, 8], salt="k")
    cache.forget(7)  # not a leaf
    assert cache.match([1, 2, 3, 4], 4, "k") == []
    assert cache.publish(None, [(1, 2)], [[9]], "k") == [[9]]
    assert cache.match([1, 2, 3, 4], 4, "k") == [[9], [8]]


def test_forgetting_leaf_first_empties_the_trie():
    cache = RadixPrefixCache(2)
    publish_chain(cache, [1, 2, 3, 4], [7, 8], salt="k")
    cache.forget(8)
    assert cache.match([1, 2, 3, 4], 4, "k") == [[7]]
    cache.forget(7)
    assert len(cache) == 0 and not cache._roots


def test_content_spells_the_tokens_from_the_start():
    cache = RadixPrefixCache(2)
    publish_chain(cache, [1, 2, 3, 4], [7, 8])
    assert cache.content(8) == [1, 2, 3, 4]


def test_a_hash_collision_serves_no_wrong_block():
    cache = RadixPrefixCache(2)
    prompts = [[CollidingToken(a), CollidingToken(b)] for a in range(20) for b in range(20)]
    for block, prompt in enumerate(prompts):
        assert cache.publish(None, [tuple(prompt)], [[block]], "") == [[block]]
    for block, prompt in enumerate(prompts):
        assert cache.match(prompt, 2, "") == [[block]]
    assert cache.match([CollidingToken(40), CollidingToken(0)], 2, "") == []


def test_no_prefix_cache_remembers_nothing():
    cache = NoPrefixCache()
    assert cache.publish(None, [(1, 2)], [[3]], "") == [[3]]
    assert not cache.match([1, 2], 2, "") and 3 not in cache
