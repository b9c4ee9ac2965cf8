"""DRY's penalties: those of a plain search for repeated sequences, however tokens come."""

from __future__ import annotations

import random

import pytest

from octavo.core.repetition import MAX_LENGTH, MAX_PLACES, Repetition
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"dry_multiplier": 0.8, **fields})


def searched(asked: SamplingParams, tokens: list[int], breakers=()) -> dict[int, float]:
    """The penalties, by looking at every place of a text."""
    last_n = asked.dry_penalty_last_n
    tokens = tokens if last_n < 0 else tokens[max(len(tokens) - last_n, 0) :]
    longest: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        length = 0
        while (
            length <= place
            and tokens[place - length] == tokens[-1 - length]
            and tokens[place - length] not in breakers
        ):
            length += 1
        length = min(length, MAX_LENGTH)
        if length >= asked.dry_allowed_length:
            longest[tokens[place + 1]] = max(longest.get(tokens[place + 1], 0), length)
    return {
        token_id: asked.dry_multiplier * asked.dry_base ** (length - asked.dry_allowed_length)
        for token_id, length in longest.items()
    }


def test_the_next_token_of_a_sequence_costs_by_its_length():
    repetition = Repetition(params(dry_base=2.0), ())
    repetition.advance([5, 1, 2, 3, 4, 9, 1, 2])
    assert repetition.penalties() == pytest.approx({3: 0.8})
    assert repetition.penalties([3]) == pytest.approx({4: 1.6})
    assert repetition.penalties([7]) == {}
    repetition.advance([3])
    assert repetition.penalties() == pytest.approx({4: 1.6})


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_finds(seed):
    rng = random.Random(seed)
    asked = params(
        dry_allowed_length=rng.randint(1, 4),
        dry_base=rng.choice([1.0, 1.2, 1.75]),
        dry_penalty_last_n=rng.choice([-1, -1, 3, 20, 200]),
    )
    breakers = set(rng.sample(range(6), rng.randint(0, 2)))
    tokens: list[int] = []
    repetition = Repetition(asked, breakers)
    for _ in range(60):
        if tokens and rng.random() < 0.3:  # repeat something
            begin = rng.randrange(len(tokens))
            piece = tokens[begin : begin + rng.randint(1, 30)]
        else:
            piece = [rng.randrange(6) for _ in range(rng.choice([1, 1, 2, 90]))]
        later = [rng.randrange(6) for _ in range(rng.randint(0, 4))]
        repetition.advance(piece)
        tokens += piece
        for drafted in ([], later, later[:1]):
            expected = searched(asked, tokens + drafted, breakers)
            assert repetition.penalties(drafted) == pytest.approx(expected)


def test_a_text_of_one_token_is_looked_at_in_part():
    repetition = Repetition(params(dry_base=100.0), ())
    repetition.advance([7] * 5000)
    assert len(repetition._lengths) == MAX_PLACES
    (penalty,) = repetition.penalties().values()
    assert 1e30 < penalty < 1e38  # in a float


def test_a_request_forgets_what_was_taken_back():
    request = Request("r", [1, 2, 3, 1], params(dry_allowed_length=1), 0.0)
    assert request.dry_penalties() == pytest.approx({2: 0.8})
    request.token_ids += [2, 5]
    assert request.dry_penalties() == {}
    del request.token_ids[-2:]
    assert request.dry_penalties() == pytest.approx({2: 0.8})
    assert request.dry_penalties([2]) == pytest.approx({3: 0.8 * 1.75})


def test_nothing_is_followed_where_nobody_asks():
    for asked in (params(dry_multiplier=0.0), params(dry_penalty_last_n=0)):
        request = Request("r", [1, 2, 1, 2], asked, 0.0)
        assert request.dry_penalties() == {} and request.repetition is None
        assert not asked.has_penalties
