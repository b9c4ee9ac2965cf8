from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import QueueFullError
from octavo.server.http.shared_limits import FREE_BYTES, BodyMemory, ConnectionCounts


def test_connections_are_counted_by_address():
    counts = ConnectionCounts()
    assert [counts.add(address) for address in ("a", "a", "b", "a")] == [1, 2, 1, 3]
    counts.remove("a")
    assert counts.add("a") == 3


def test_small_bodies_take_nothing_and_one_address_gets_half():
    memory = BodyMemory(1000)
    small = [memory.open("a") for _ in range(50)]
    for share in small:
        share.add(FREE_BYTES)
    one, other, theirs, late = (memory.open(address) for address in "aabc")
    one.add(FREE_BYTES + 400)
    with pytest.raises(QueueFullError, match="your other requests"):
        other.add(FREE_BYTES + 101)
    theirs.add(FREE_BYTES + 500)
    with pytest.raises(QueueFullError, match="of other requests"):
        late.add(FREE_BYTES + 101)
    one.close()
    one.close()
    late.add(0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300)), max_size=40))
def test_no_more_is_taken_than_there_is_and_all_comes_back(bodies):
    memory = BodyMemory(1000)
    shares = []
    for address, size in bodies:
        share = memory.open(address)
        share.add(FREE_BYTES)
        try:
            share.add(size)
        except QueueFullError:
            share.close()
        else:
            shares.append((share, address, size))
        assert sum(size for _, _, size in shares) <= 1000
        for name in "abc":
            assert sum(size for _, of, size in shares if of == name) <= 500
    for share, _, _ in shares:
        share.close()
    whole = [memory.open("a"), memory.open("b")]
    for share in whole:
        share.add(FREE_BYTES + 500)
