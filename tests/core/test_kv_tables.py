from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.kv_tables import first_kept, longest_sequence, most_blocks

windows = st.lists(st.integers(1, 40), max_size=3).flatmap(
    lambda some: st.sampled_from([(None, *some), (*some,) or (None,)])
)
sizes = st.sampled_from([1, 2, 3, 8, 16])


def test_a_table_without_a_window_keeps_all():
    assert first_kept(None, 1000, 4) == 0


def test_a_window_keeps_what_the_next_query_sees():
    # The query at 100 sees 91 .. 99 and itself.
    assert first_kept(10, 100, 8) == 91 // 8
    assert first_kept(10, 5, 8) == 0


@given(st.integers(1, 60), st.integers(0, 200), st.integers(0, 50), sizes)
def test_no_later_query_sees_a_block_that_is_not_kept(window, num_tokens, later, size):
    first_seen = max(0, num_tokens + later - window + 1)
    kept = first_kept(window, num_tokens, size)
    assert kept * size <= first_seen or kept == 0
    assert kept <= max(0, num_tokens // size - 1)


@given(windows, st.integers(1, 300), sizes, st.integers(1, 64))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(groups, blocks, size, step):
    limit = 2000
    longest = longest_sequence(groups, blocks, size, step, limit)
    assert longest <= limit
    if longest:
        assert most_blocks(groups, longest, size, step) <= blocks
    if longest < limit:
        assert most_blocks(groups, longest + size, size, step) > blocks


def test_windows_alone_hold_a_sequence_of_any_length():
    assert longest_sequence((512,), 200, 16, 512, 1_000_000) == 1_000_000
    assert longest_sequence((None,), 200, 16, 512, 1_000_000) == 3200
