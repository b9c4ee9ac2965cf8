"""Which models go for another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.server.registry.eviction import Resident, models_to_unload


def names(missing: int, *residents: Resident) -> list[str] | None:
    chosen = models_to_unload(missing, residents)
    return None if chosen is None else [each.name for each in chosen]


def test_the_least_recently_used_goes_first():
    assert names(5, Resident("new", 10, 2.0), Resident("old", 10, 1.0)) == ["old"]


def test_pinned_ones_stay():
    old, new = Resident("old", 10, 1.0, is_pinned=True), Resident("new", 10, 2.0)
    assert names(5, old, new) == ["new"]
    assert names(15, old, new) is None


def test_idle_ones_go_before_busy_ones():
    busy, idle = Resident("busy", 10, 1.0, is_busy=True), Resident("idle", 10, 2.0)
    assert names(5, busy, idle) == ["idle"]
    assert names(15, busy, idle) == ["idle", "busy"]


def test_none_goes_that_need_not():
    """The large one has to go anyway, and frees enough."""
    small, large = Resident("small", 3, 1.0), Resident("large", 10, 2.0)
    assert names(8, small, large) == ["large"]


RESIDENTS = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 9), st.booleans(), st.booleans()), max_size=6
).map(lambda rows: [Resident(str(i), *row) for i, row in enumerate(rows)])


@given(st.integers(1, 120), RESIDENTS)
def test_what_goes_is_enough_and_each_of_it_is_needed(missing, residents):
    chosen = models_to_unload(missing, residents)
    most = sum(each.num_bytes for each in residents if not each.is_pinned)
    if chosen is None:
        assert most < missing
        return
    freed = sum(each.num_bytes for each in chosen)
    assert freed >= missing
    assert all(freed - each.num_bytes < missing for each in chosen)
    assert not any(each.is_pinned for each in chosen)
