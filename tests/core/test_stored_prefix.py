"""What a store has to add to the pool's blocks: against trying every position and every number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.block_store import BlockPart, part_key
from octavo.core.kv_tables import GONE
from octavo.core.stored_prefix import StoredPrefix

WINDOWS = [(None,), (3,), (9,), (None, 4), (None, 2, 7)]


def needed(windows, size: int, count: int) -> set[tuple[int, int]]:
    """Groups and blocks that the query after so many blocks sees, and the last one of each."""
    end = count * size
    return {
        (group, position // size)
        for group, window in enumerate(windows)
        for position in {*range(0 if window is None else max(0, end - window + 1), end), end - 1}
    }


@st.composite
def prefixes(draw):
    windows, size = draw(st.sampled_from(WINDOWS)), draw(st.integers(1, 4))
    count = draw(st.integers(0, 9))
    row = st.lists(st.sampled_from([GONE, 5]), min_size=len(windows), max_size=len(windows))
    path = draw(st.lists(row, max_size=count))
    keys = [bytes([n]) * 32 for n in range(count)]
    of_parts = [part_key(key, group) for key in keys for group in range(len(windows))]
    stored = {key for key in of_parts if draw(st.integers(0, 9))}
    return windows, size, keys, path, stored


@given(prefixes())
def test_what_is_missing_is_what_is_seen_and_not_in_the_pool(given_prefix):
    windows, size, keys, path, stored = given_prefix
    in_pool = {(g, n) for n, row in enumerate(path) for g, block in enumerate(row) if block != GONE}

    def missing(count: int) -> set[tuple[int, int]]:
        return needed(windows, size, count) - in_pool

    served = [
        count
        for count in range(1, len(keys) + 1)
        if all(part_key(keys[number], group) in stored for group, number in missing(count))
    ]
    known = [count for count in range(len(keys) + 1) if not count or not missing(count)]
    for num_known in known:
        prefix = StoredPrefix(keys, path, num_known, windows, size)
        more = [count for count in served if count > num_known]
        assert prefix.counts(stored.__contains__) == more
        check_parts(prefix, keys, {count: missing(count) for count in more})


def check_parts(prefix, keys, missing) -> None:
    for count, places in missing.items():
        parts = prefix.parts(count)
        assert {(part.group, part.number) for part in parts} == places
        assert all(part.key == part_key(keys[part.number], part.group) for part in parts)


def test_the_example_of_the_module():
    keys = [b"k0", b"k1", b"k2", b"k3"]
    prefix = StoredPrefix(keys, [[3, GONE], [8, 9]], 2, (None, 3), 4)
    assert prefix.counts({b"k2", b"k3", b"k3\1"}.__contains__) == [4]
    assert prefix.parts(4) == [
        BlockPart(0, 2, b"k2"),
        BlockPart(0, 3, b"k3"),
        BlockPart(1, 3, b"k3\1"),
    ]
