"""What is shown of an engine is what it holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import engine_snapshot
from octavo.core.engine_snapshot import CACHED, FREE, EngineSnapshot
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.sampling_params import SamplingParams


@pytest.fixture
def engine(hash_engine):
    return hash_engine()


def add(engine, name: str, prompt: list[int], num_tokens: int = 4) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    engine.add(name, None, prompt, params)


def finish(engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


def spread(pool: dict) -> list[int]:
    runs = iter(pool["runs"])
    return [who for who, count in zip(runs, runs, strict=True) for _ in range(count)]


def test_rows_and_map_of_two_requests_with_one_beginning(engine):
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    add(engine, "a", prompt)
    finish(engine)
    add(engine, "b", [*prompt, 9])
    add(engine, "c", [*prompt, 10, 11], num_tokens=9)
    look = EngineSnapshot(engine.engine)
    shown = look.at_step(engine.step()[1])
    assert [row[:4] for row in shown["rows"]] == [("b#0", 8, 1, 1), ("c#0", 8, 2, 1)] or [
        tuple(row[1:4]) for row in shown["rows"]
    ] == [(8, 1, 1), (8, 2, 1)], "what was cached is not computed: they begin after it"
    holders = spread(shown["pool"])
    blocks = engine.engine.scheduler.block_manager
    assert len(holders) == shown["pool"]["num_blocks"] == blocks.num_blocks
    assert holders.count(FREE) == blocks.num_free_blocks
    assert holders.count(CACHED) == blocks.num_cached_blocks
    assert holders.count(engine_snapshot.SHARED) == 2, "the two blocks of the prompt of both"
    assert holders.count(0) and holders.count(1)
    first = shown["prefixes"][0]
    assert first[0] == -1 and first[3] == 2, "two requests have found it"
    finish(engine)
    assert set(spread(look.picture()["pool"])) == {FREE, CACHED}


def test_of_a_large_pool_every_few_blocks_are_shown(engine, monkeypatch):
    monkeypatch.setattr(engine_snapshot, "_MOST_CELLS", 100)
    pool = EngineSnapshot(engine.engine).picture()["pool"]
    assert (pool["num_blocks"], pool["every"], pool["runs"]) == (512, 6, [FREE, 86])


def test_what_takes_long_is_done_seldom(engine, monkeypatch):
    monkeypatch.setattr(engine_snapshot, "_SHARE", 1e-9)
    monkeypatch.setattr(engine_snapshot, "_ROWS_INTERVAL", 0.0)
    add(engine, "a", [1, 2, 3], num_tokens=6)
    look = EngineSnapshot(engine.engine)
    assert look.seconds_to_picture == 0
    assert look.at_step(engine.step()[1]).keys() == {"rows", "preempted", "pool", "prefixes"}
    assert look.seconds_to_picture > 1
    while engine.has_unfinished_requests:
        assert look.at_step(engine.step()[1]) == {}, "nor at the end"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=12), st.data())
def test_an_outline_is_that_of_the_prefixes(prompts, data):
    cache, paths, number = RadixPrefixCache(1), {}, 0
    hits = dict.fromkeys(range(99), 0)
    for prompt in prompts:
        parent = None
        for end in range(1, len(prompt) + 1):
            ((parent,),) = cache.publish(parent, [(prompt[end - 1],)], [[number]], "")
            paths[tuple(prompt[:end])] = parent
            number += parent == number
        cache.count_hit(parent)
        hits[parent] += 1
    parts = cache.largest_parts(99)
    assert sum(length for _, length, _, _ in parts) == len(paths) == len(cache)
    assert sum(h for parent, _, _, h in parts if parent < 0) == len(prompts)
    assert all(parent < index for index, (parent, *_) in enumerate(parts))
    for parent, _, size, num_hits in parts:
        assert parent < 0 or (parts[parent][2] > size and parts[parent][3] >= num_hits)
    hits_at = {path: hits[node] for path, node in paths.items()}
    assert sorted(part[1:] for part in parts) == sorted(stretches(hits_at))
    assert [size for _, _, size, _ in parts] == sorted((part[2] for part in parts), reverse=True)
    most = data.draw(st.integers(0, 5))
    assert cache.largest_parts(most) == parts[:most]


def stretches(hits: dict[tuple[int, ...], int]) -> list[tuple[int, int, int]]:
    """Length, size and hits of each, looked for one by one among all paths with their hits."""

    def children(path):
        return [each for each in hits if each[:-1] == path]

    found = []
    for path in hits:
        if len(path) > 1 and len(children(path[:-1])) == 1:
            continue  # it goes on with the stretch before it
        end, after = path, [each for each in hits if each[: len(path)] == path]
        while len(children(end)) == 1:
            (end,) = children(end)
        found.append((1 + len(end) - len(path), len(after), sum(hits[each] for each in after)))
    return found


def test_hits_outlive_the_blocks_that_had_them():
    cache = RadixPrefixCache(1)
    cache.publish(None, [(1,)], [[5]], "")
    cache.publish(5, [(2,)], [[6]], "")
    cache.count_hit(6)
    cache.forget(6)
    assert cache.largest_parts(9) == [(-1, 1, 1, 1)]
