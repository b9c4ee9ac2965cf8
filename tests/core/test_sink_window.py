from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError, InvalidRequestError, PromptTooLongError
from octavo.core.limits import check_sight, total_tokens_of
from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import SPLIT, Sight, SightRules, unit_left_out
from octavo.runtime.input_batch import blocks_of_row

sights = st.builds(
    lambda sinks, window, stride: Sight(sinks, window, min(window, stride)),
    st.integers(0, 40),
    st.integers(1, 60),
    st.sampled_from([1, 1, 2, 7, 30, 60]),
)
block_sizes = st.sampled_from([1, 2, 3, 16, 48])


@given(sights, st.integers(1, 300))
def test_a_query_sees_what_a_cache_that_is_shifted_has(sight, length):
    cache: list[int] = []
    for position in range(length):
        if len(cache) == sight.num_tokens:
            del cache[sight.sinks : sight.sinks + sight.stride]
        cache.append(position)
        seen = {*range(min(sight.sinks, position + 1))}
        seen |= {*range(sight.first_seen(position), position + 1)}
        assert seen == {*cache}
        assert sight.place(position) == len(cache) - 1 or position < sight.sinks


@given(sights, st.integers(0, 400), st.integers(0, 100), block_sizes)
def test_no_later_query_sees_what_is_left_behind(sight, num_tokens, later, size):
    gone = sight.left_behind(num_tokens, size)
    assert gone.start * size >= sight.sinks
    assert gone.stop * size <= sight.first_seen(num_tokens + later) or not gone
    assert not gone or gone.stop < num_tokens // size  # the last full block stays


@given(sights, st.integers(0, 3000), st.integers(1, 64), block_sizes)
def test_tables_without_what_is_left_out_stay_short(sight, num_tokens, step, size):
    left_out = sight.left_out(num_tokens, size)
    assert left_out % SPLIT == left_out % size == 0
    assert left_out <= len(sight.left_behind(num_tokens, size)) * size
    kept = -(-(num_tokens + step) // size) - left_out // size
    assert kept <= sight.most_blocks(size, step) + unit_left_out(size) // size
    longest = blocks_of_row(sight.num_tokens, step, size)
    assert kept <= longest


@given(sights, st.integers(0, 3000), st.integers(1, 64), block_sizes)
def test_what_is_held_is_no_more_than_is_counted_on(sight, num_computed, step, size):
    # What was left behind has gone when the last block became full.
    gone = len(sight.left_behind(num_computed // size * size, size))
    held = -(-(num_computed + step) // size) - gone
    assert held <= sight.most_blocks(size, step)


def test_angles_begin_anew():
    sight = Sight(4, 5000)
    assert sight.turn == 8192 and sight.turn % SPLIT == 0
    assert sight.num_angles(100) == 100 and sight.num_angles(8192) == 8192
    assert sight.num_angles(8193) == sight.num_angles(10**9) == 8192 + 5000


def of(rules: SightRules, **asked) -> Sight | None:
    return rules.of(SamplingParams(**asked), 100)


def test_requests_have_the_sight_that_they_or_the_engine_ask_for():
    assert of(SightRules()) is None
    assert of(SightRules(), window=20) == Sight(4, 20)
    assert of(SightRules(window=50)) == Sight(4, 50)
    assert of(SightRules(window=50), window=0) is None
    assert of(SightRules(2, 50), window=60) == Sight(2, 60)
    assert of(SightRules(2, 50), attention_sinks=0) == Sight(0, 50)
    assert of(SightRules(context_shift=True)) == Sight(0, 100, 50)
    assert of(SightRules(context_shift=True, n_keep=7)) == Sight(7, 93, 46)
    assert of(SightRules(context_shift=True, n_keep=7), n_keep=0) == Sight(0, 100, 50)
    assert of(SightRules(context_shift=True), window=9) == Sight(4, 9)


@pytest.mark.parametrize(
    ("rules", "asked", "field", "message"),
    [
        (SightRules(), {"attention_sinks": 4}, "attention_sinks", "there is none"),
        (SightRules(), {"n_keep": 4}, "n_keep", "none is made"),
        (SightRules(window=9, context_shift=True), {"n_keep": 4}, "n_keep", "none is made"),
        (SightRules(context_shift=True), {"n_keep": 99}, "n_keep", "of a context of 100"),
        (SightRules(), {"window": 97}, "window", "more than the 100 tokens"),
        (SightRules(why_not="no rope"), {"window": 9}, "window", "no rope"),
    ],
)
def test_what_cannot_be_seen_is_refused(rules, asked, field, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        of(rules, **asked)
    assert error.value.field == field


def test_an_engine_whose_requests_could_have_no_sight_does_not_start():
    with pytest.raises(ConfigError, match="more than the 8 tokens"):
        SightRules(window=5).check(8)
    SightRules(window=4).check(8)
    SightRules(why_not="no rope").check(8)


def test_who_sees_a_part_may_become_longer_than_the_context():
    assert total_tokens_of(500, 1000, 100, 50, Sight(4, 20)) == 1500
    with pytest.raises(PromptTooLongError):  # it does not say how long
        total_tokens_of(500, None, 100, 50, Sight(4, 20))
    assert total_tokens_of(10, None, 100, 200, Sight(4, 20)) == 100


def test_a_pool_has_to_hold_what_is_seen_and_a_step():
    check_sight(Sight(4, 20), 1000, num_blocks=8, block_size=16, step_tokens=32)
    check_sight(Sight(4, 20), 30, num_blocks=2, block_size=16, step_tokens=32)  # all of it
    with pytest.raises(InvalidRequestError, match="take 7 blocks"):
        check_sight(Sight(4, 20), 1000, num_blocks=5, block_size=16, step_tokens=32)
