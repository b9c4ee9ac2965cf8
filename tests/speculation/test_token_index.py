"""Where runs of tokens were before, against a search through the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.speculation.past_answers import PastAnswers
from octavo.speculation.token_index import MatchPlace, TokenIndex

texts = st.lists(st.integers(0, 2), max_size=40)
DEPTH = 8


def searched(text, context, least, begin=0):
    """All places after at least ``least`` tokens that the context ends with, by comparing."""
    found = []
    for position in range(begin + 1, len(text)):
        length = 0
        while (
            length < min(DEPTH, position, len(context))
            and text[position - 1 - length] == context[-1 - length]
        ):
            length += 1
        if length >= least:
            found.append(MatchPlace(position, length))
    return sorted(found, key=lambda place: (-place.length, -place.position))


@given(texts, st.lists(st.integers(1, 6)), st.sampled_from([(1, 2, 4, 8), (2, 3, 4, 5), (3,)]))
def test_an_index_finds_what_a_search_finds(text, pieces, lengths):
    tokens: list[int] = []
    index = TokenIndex(lengths, tokens)
    while len(tokens) < len(text):  # several tokens at once, now and then
        count = pieces.pop() if pieces else 1
        tokens += text[len(tokens) : len(tokens) + count]
        index.catch_up()
        expected = searched(tokens, tokens, lengths[0])
        assert index.places(tokens, 1000, DEPTH) == expected
        assert index.longest(tokens, 1000, DEPTH) == (expected[0] if expected else None)


@given(texts, texts, texts)
def test_a_prompt_is_indexed_once_for_its_samples(prompt, one, other):
    shared = TokenIndex((1, 2, 4), prompt)
    shared.catch_up()
    before = shared.num_entries
    for output in (one, other):
        text = prompt + output
        index = TokenIndex((1, 2, 4), text, shared)
        index.catch_up()
        assert index.places(text, 1000, DEPTH) == searched(text, text, 1)
        assert index.num_entries <= 3 * len(output)
    assert shared.num_entries == before


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=8), texts)
def test_what_is_dropped_is_no_place_and_has_no_memory(parts, context):
    tokens: list[int] = []
    index = TokenIndex((1, 2, 4), tokens)
    whole: list[int] = []
    for number, part in enumerate(parts):
        tokens += part
        whole += part
        index.catch_up()
        if number >= 2:
            index.drop(len(parts[number - 2]))
        live = whole[index.begin :]
        found = index.places(context, 1000, DEPTH)
        assert found == searched(whole, context, 1, index.begin)
        assert index.num_entries <= 3 * len(live)
        assert len(tokens) <= 2 * len(live) + 2 * 4 + 1


def test_only_the_most_recent_places_are_looked_at():
    tokens = [1, 2] * 500
    index = TokenIndex((1, 2), tokens)
    index.catch_up()
    places = index.places(tokens, 5, DEPTH)
    assert [place.position for place in places] == [998, 996, 994, 992, 990]


class Counting(list):
    """Tokens that count how many of them are read."""

    reads = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("period", [1, 7, 100_000])
def test_a_token_costs_the_same_in_a_long_text(period):
    tokens = Counting()
    index = TokenIndex((2, 3, 4, 5), tokens)
    for position in range(3_000):
        tokens.append(position % period)
        index.catch_up()
        index.longest(list.__getitem__(tokens, slice(-32, None)), 16, 32)
    assert tokens.reads < 3_000 * (14 + 17 * (5 + 32 + 2 * 32))
    tokens.reads = 0
    for _ in range(10):
        tokens.append(0)
        index.catch_up()
    assert tokens.reads <= 10 * 14


# -- past answers --------------------------------------------------------------------------------


def test_tenants_do_not_see_each_other():
    past = PastAnswers((1, 2), 10, 1000)
    past.add("a", [1, 2, 3])
    past.add("", [4, 5, 6])
    one, other = past.of("a"), past.of("")
    assert one.places([1, 2], 9, DEPTH) and not other.places([1, 2], 9, DEPTH)
    assert other.places([5], 9, DEPTH) and not one.places([5], 9, DEPTH)
    assert past.of("b") is None


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), texts), max_size=40))
def test_the_oldest_answers_make_room(answers):
    past = PastAnswers((1, 2, 4), 5, 60)
    kept: list[tuple[str, list[int]]] = []
    for tenant, answer in answers:
        past.add(tenant, answer)
        kept.append((tenant, answer))
        while len(kept) > 5 or sum(len(a) + 1 for _, a in kept) > 60:
            kept.pop(0)
        assert past.num_answers == len(kept)
        assert past.num_tokens == sum(len(a) + 1 for _, a in kept) <= 60
        assert past.num_tenants == len({name for name, _ in kept})
        index = past.of(tenant)
        mine = sum(answer.count(1) for name, answer in kept if name == tenant)
        assert len(index.places([1], 1000, 1)) == mine
        entries = sum(past.of(name).num_entries for name in {name for name, _ in kept})
        assert entries <= 3 * past.num_tokens


def test_no_answer_is_kept_that_there_is_no_room_for():
    past = PastAnswers((1,), 3, 10)
    past.add("", [1] * 10)
    assert past.num_answers == 0 and past.of("") is None
    nothing = PastAnswers((1,), 0, 10)
    nothing.add("", [1])
    assert nothing.num_answers == 0
