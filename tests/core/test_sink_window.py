from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError, InvalidRequestError, PromptTooLongError
from octavo.core.limits import check_sink_window, total_tokens_of
from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import SPLIT, SinkWindow, SinkWindowRules, unit_left_out
from octavo.runtime.input_batch import blocks_of_row

sink_windows = st.builds(
    lambda sinks, window, stride: SinkWindow(sinks, window, min(window, stride)),
    st.integers(0, 40),
    st.integers(1, 60),
    st.sampled_from([1, 1, 2, 7, 30, 60]),
)
block_sizes = st.sampled_from([1, 2, 3, 16, 48])


@given(sink_windows, st.integers(1, 300))
def test_a_query_sees_what_a_cache_that_is_shifted_has(sink_window, length):
    cache: list[int] = []
    for position in range(length):
        if len(cache) == sink_window.num_tokens:
            del cache[sink_window.sinks : sink_window.sinks + sink_window.stride]
        cache.append(position)
        seen = {*range(min(sink_window.sinks, position + 1))}
        seen |= {*range(sink_window.first_seen(position), position + 1)}
        assert seen == {*cache}
        assert sink_window.place(position) == len(cache) - 1 or position < sink_window.sinks


@given(sink_windows, st.integers(0, 400), st.integers(0, 100), block_sizes)
def test_no_later_query_sees_what_is_left_behind(sink_window, num_tokens, later, size):
    gone = sink_window.left_behind(num_tokens, size)
    assert gone.start * size >= sink_window.sinks
    assert gone.stop * size <= sink_window.first_seen(num_tokens + later) or not gone
    assert not gone or gone.stop < num_tokens // size  # the last full block stays


@given(sink_windows, st.integers(0, 3000), st.integers(1, 64), block_sizes)
def test_tables_without_what_is_left_out_stay_short(sink_window, num_tokens, step, size):
    left_out = sink_window.left_out(num_tokens, size)
    assert left_out % SPLIT == left_out % size == 0
    assert left_out <= len(sink_window.left_behind(num_tokens, size)) * size
    kept = -(-(num_tokens + step) // size) - left_out // size
    assert kept <= sink_window.most_blocks(size, step) + unit_left_out(size) // size
    longest = blocks_of_row(sink_window.num_tokens, step, size)
    assert kept <= longest


@given(sink_windows, st.integers(0, 3000), st.integers(1, 64), block_sizes)
def test_what_is_held_is_no_more_than_is_counted_on(sink_window, num_computed, step, size):
    # What was left behind has gone when the last block became full.
    gone = len(sink_window.left_behind(num_computed // size * size, size))
    held = -(-(num_computed + step) // size) - gone
    assert held <= sink_window.most_blocks(size, step)


def test_angles_begin_anew():
    sink_window = SinkWindow(4, 5000)
    assert sink_window.turn == 8192 and sink_window.turn % SPLIT == 0
    assert sink_window.num_angles(100) == 100 and sink_window.num_angles(8192) == 8192
    assert sink_window.num_angles(8193) == sink_window.num_angles(10**9) == 8192 + 5000


def of(rules: SinkWindowRules, **asked) -> SinkWindow | None:
    return rules.of(SamplingParams(**asked), 100)


def test_requests_have_the_sight_that_they_or_the_engine_ask_for():
    assert of(SinkWindowRules()) is None
    assert of(SinkWindowRules(), window=20) == SinkWindow(4, 20)
    assert of(SinkWindowRules(window=50)) == SinkWindow(4, 50)
    assert of(SinkWindowRules(window=50), window=0) is None
    assert of(SinkWindowRules(2, 50), window=60) == SinkWindow(2, 60)
    assert of(SinkWindowRules(2, 50), attention_sinks=0) == SinkWindow(0, 50)
    assert of(SinkWindowRules(context_shift=True)) == SinkWindow(0, 100, 50)
    assert of(SinkWindowRules(context_shift=True, n_keep=7)) == SinkWindow(7, 93, 46)
    assert of(SinkWindowRules(context_shift=True, n_keep=7), n_keep=0) == SinkWindow(0, 100, 50)
    assert of(SinkWindowRules(context_shift=True), window=9) == SinkWindow(4, 9)


@pytest.mark.parametrize(
    ("rules", "asked", "field", "message"),
    [
        (SinkWindowRules(), {"attention_sinks": 4}, "attention_sinks", "there is none"),
        (SinkWindowRules(), {"n_keep": 4}, "n_keep", "none is made"),
        (SinkWindowRules(window=9, context_shift=True), {"n_keep": 4}, "n_keep", "none is made"),
        (SinkWindowRules(context_shift=True), {"n_keep": 99}, "n_keep", "of a context of 100"),
        (SinkWindowRules(), {"window": 97}, "window", "more than the 100 tokens"),
        (SinkWindowRules(why_not="no rope"), {"window": 9}, "window", "no rope"),
    ],
)
def test_what_cannot_be_seen_is_refused(rules, asked, field, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        of(rules, **asked)
    assert error.value.field == field


def test_an_engine_whose_requests_could_have_no_sight_does_not_start():
    with pytest.raises(ConfigError, match="more than the 8 tokens"):
        SinkWindowRules(window=5).check(8)
    SinkWindowRules(window=4).check(8)
    SinkWindowRules(why_not="no rope").check(8)


def test_who_sees_a_part_may_become_longer_than_the_context():
    assert total_tokens_of(500, 1000, 100, 50, SinkWindow(4, 20)) == 1500
    with pytest.raises(PromptTooLongError):  # it does not say how long
        total_tokens_of(500, None, 100, 50, SinkWindow(4, 20))
    assert total_tokens_of(10, None, 100, 200, SinkWindow(4, 20)) == 100


def test_a_pool_has_to_hold_what_is_seen_and_a_step():
    check_sink_window(SinkWindow(4, 20), 1000, num_blocks=8, block_size=16, step_tokens=32)
    check_sink_window(
        SinkWindow(4, 20), 30, num_blocks=2, block_size=16, step_tokens=32
    )  # all of it
    with pytest.raises(InvalidRequestError, match="take 7 blocks"):
        check_sink_window(SinkWindow(4, 20), 1000, num_blocks=5, block_size=16, step_tokens=32)
