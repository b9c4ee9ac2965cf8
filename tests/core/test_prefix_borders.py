"""What is found of prompts where windows, sink windows and evictions leave holes: against a plain
oracle, which knows every prefix by its tokens."""

from __future__ import annotations

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.kv_tables import GONE
from octavo.core.prefix_cache import MissReason, NoPrefixCache, RadixPrefixCache
from octavo.core.sampling_params import SamplingParams
from tests.core.test_simulation import WINDOWS, Press


class PlainCache:
    """A ``PrefixCache`` that spells out every prefix, and looks for the longest by trying all."""

    def __init__(self, block_size, windows):
        self.size, self.windows = block_size, windows
        self.known = {}  # (salt, tokens from the beginning) -> a block of each group
        self.where = {}  # block -> that key

    def match(self, token_ids, limit, salt):
        most = min(limit, len(token_ids)) // self.size
        for count in range(most, 0, -1):
            keys = [(salt, tuple(token_ids[: self.size * (i + 1)])) for i in range(count)]
            blocks = [self.known.get(key, [GONE] * len(self.windows)) for key in keys]
            if all(
                blocks[i][group] != GONE
                for group, window in enumerate(self.windows)
                for i in self.needed(window, count)
            ):
                return blocks
        return []

    def needed(self, window, count):
        """The blocks of so many that the query after them sees, and the last one."""
        end = count * self.size
        first = 0 if window is None else max(0, end - window + 1)
        return {position // self.size for position in range(first, end)} | {count - 1}

    def publish(self, parent_block, tokens, block_ids, salt):
        before = () if parent_block is None else self.where[parent_block][1]
        for edge, row in zip(tokens, block_ids, strict=True):
            before = *before, *edge
            known = self.known.setdefault((salt, before), [GONE] * len(row))
            for group, block_id in enumerate(row):
                if known[group] == GONE != block_id:
                    known[group] = block_id
                    self.where[block_id] = salt, before

    def forget(self, block_id):
        known = self.known[self.where.pop(block_id)]
        known[known.index(block_id)] = GONE


class BothCaches(RadixPrefixCache):
    """The trie, which has to say what the plain one says. Counts what was found, and where it
    ended at a hole."""

    def __init__(self, block_size, windows):
        super().__init__(block_size, windows)
        self.plain = PlainCache(block_size, windows)
        self.num_found = self.num_cut = 0

    def match(self, token_ids, limit, salt):
        found = super().match(token_ids, limit, salt)
        wanted = self.plain.match(token_ids, limit, salt)
        assert len(found) == len(wanted)
        for count, (blocks, others) in enumerate(zip(found, wanted, strict=True)):
            for group, window in enumerate(self._windows):
                if count in self.plain.needed(window, len(found)):
                    assert blocks[group] == others[group] != GONE
        self.num_found += len(found)
        reason = self.why_no_more(token_ids, len(found) * self.block_size, limit, salt)
        has_room = (len(found) + 1) * self.block_size <= min(limit, len(token_ids))
        assert (reason is MissReason.BLOCK_BORDER) == (not has_room)
        self.num_cut += reason in (MissReason.LEFT_BEHIND, MissReason.EVICTED)
        return found

    def publish(self, parent_block, tokens, block_ids, salt):
        self.plain.publish(parent_block, tokens, block_ids, salt)
        return super().publish(parent_block, tokens, block_ids, salt)

    def forget(self, block_id):
        self.plain.forget(block_id)
        super().forget(block_id)


@pytest.mark.parametrize("windows", [*WINDOWS, None])
def test_the_trie_finds_what_trying_all_prefixes_finds(windows, make_engine, make_request):
    num_found = num_cut = 0
    for seed in range(300, 308):
        press = Press(
            seed, make_engine, make_request, windows or (None,), has_sink_windows=not windows
        )
        blocks = press.engine.scheduler.block_manager
        if not isinstance(blocks.prefix_cache, NoPrefixCache):
            blocks.prefix_cache = cache = BothCaches(blocks.block_size, blocks.windows)
            press.run()
            num_found += cache.num_found
            num_cut += cache.num_cut
    assert num_found > 100 and num_cut > 0


def reason_of(cache, tokens, salt=""):
    limit = len(tokens) - 1
    found = len(cache.match(tokens, limit, salt)) * cache.block_size
    return cache.why_no_more(tokens, found, limit, salt)


def test_why_no_more_is_found():
    cache = RadixPrefixCache(2)
    cache.publish(None, [(1, 2)], [[7]], "a")
    cache.publish(7, [(3, 4)], [[8]], "a")
    assert reason_of(cache, [1, 2, 3, 4, 5], "a") is MissReason.BLOCK_BORDER
    assert reason_of(cache, [1, 2, 3, 4], "a") is MissReason.BLOCK_BORDER  # the last is computed
    assert reason_of(cache, [1, 2, 3, 9, 5], "a") is MissReason.NEVER_SEEN
    assert reason_of(cache, [1, 2, 3, 4, 5], "b") is MissReason.OTHER_SALT
    cache.forget(8)
    assert reason_of(cache, [1, 2, 3, 4, 5], "a") is MissReason.EVICTED
    cache.forget(7)
    assert reason_of(cache, [1, 2, 3, 4, 5], "a") is MissReason.EVICTED
    assert reason_of(cache, [1, 2, 3, 4, 5], "b") is MissReason.NEVER_SEEN
    cache.publish(None, [(1, 2)], [[7]], "a")
    assert reason_of(cache, [1, 2, 9, 9, 9], "a") is MissReason.NEVER_SEEN
    assert NoPrefixCache().why_no_more([1, 2, 3], 0, 2, "") is MissReason.OFF


def test_what_a_window_left_behind_is_said_to_be_missing():
    cache = RadixPrefixCache(2, (None, 3))
    cache.publish(None, [(1, 2)], [[4, GONE]], "")
    assert reason_of(cache, [1, 2, 3]) is MissReason.LEFT_BEHIND


def test_a_state_that_is_not_there_is_said_to_be_missing():
    cache = RadixPrefixCache(2, (None, 3), needs_states=True)
    cache.publish(None, [(1, 2)], [[4, 5]], "")
    cache.publish(4, [(3, 4)], [[6, 7]], "")
    assert reason_of(cache, [1, 2, 3, 4, 5]) is MissReason.NO_STATE
    cache.keep_state(4, 0)
    assert reason_of(cache, [1, 2, 3, 4, 5]) is MissReason.NO_STATE
    cache.keep_state(6, 1)
    assert reason_of(cache, [1, 2, 3, 4, 5]) is MissReason.BLOCK_BORDER
    cache.forget(5)
    cache.forget(7)
    assert reason_of(cache, [1, 2, 3, 4, 5]) is MissReason.LEFT_BEHIND


def test_what_is_remembered_of_evictions_is_bounded(monkeypatch):
    monkeypatch.setattr("octavo.core.prefix_cache._REMEMBERED", 3)
    cache = RadixPrefixCache(1)
    for token in range(10):
        cache.publish(None, [(token,)], [[token]], "")
        cache.forget(token)
    assert reason_of(cache, [9, 1]) is MissReason.EVICTED
    assert reason_of(cache, [1, 1]) is MissReason.NEVER_SEEN


def test_a_request_says_why_no_more_of_it_was_found(make_engine, make_request, run):
    engine = make_engine(block_size=4, max_model_len=40)
    sighted = SamplingParams(max_tokens=1, attention_sinks=1, window=7, ignore_eos=True)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    requests = [
        make_request("first", [*range(17)]),
        make_request("again", [*range(17)]),
        make_request("sink_window", [*range(17)], params=sighted),
        make_request("logprobs", [*range(17)], params=asked),
    ]
    for request in requests:
        engine.add(request)
        run(engine)
    told = [(request.stats.num_cached_tokens, request.stats.miss_reason) for request in requests]
    assert told == [
        (0, "never_seen"),
        (16, "block_border"),
        (8, "sink_window"),
        (0, "prompt_logprobs"),
    ]


def test_a_block_manager_without_a_cache_says_so(make_request):
    blocks = BlockManager(4, 2)
    assert blocks.why_no_more(make_request("r", [1, 2, 3]), 0, 2) is MissReason.OFF
