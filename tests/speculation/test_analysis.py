"""The formulas of drafting, against published figures, simulation, and each other."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.speculation.analysis import (
    Forecast,
    acceptance_probability,
    batched_speedup,
    best_drafts,
    break_even_batch,
    expected_tokens,
    expected_tokens_by_rates,
    linear_step,
    operations_factor,
    rates_of_shares,
)

# Leviathan et al. 2023, Table 1: alpha, length, operations, speed (the draft costs nothing there).
LEVIATHAN = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]

probabilities = st.floats(0.0, 1.0)
chains = st.lists(probabilities, max_size=4)


def lone(rates, cost):
    """Drafts of one request, whose further rows are free."""
    return Forecast(tuple(rates), cost, 1, linear_step(0.0))


@pytest.mark.parametrize(("alpha", "length", "operations", "speed"), LEVIATHAN)
def test_published_table(alpha, length, operations, speed):
    tokens = expected_tokens(alpha, length)
    assert tokens == pytest.approx(speed, rel=0.005)
    assert lone([alpha] * length, 0.0).speedup(length) == pytest.approx(tokens)
    assert operations_factor(tokens, length) == pytest.approx(operations, rel=0.005)


def test_best_length_of_a_published_example():
    forecast = lone([0.8] * 16, 0.05)
    speeds = {k: forecast.speedup(k) for k in range(1, 17)}
    assert forecast.best_length == max(speeds, key=speeds.__getitem__) == 8
    for length, speed in {5: 2.951, 6: 3.040, 7: 3.082, 8: 3.092, 9: 3.078}.items():
        assert speeds[length] == pytest.approx(speed, abs=5e-4)


def test_the_linear_formula_is_not_used():
    tokens = expected_tokens(0.7, 5)
    assert tokens == pytest.approx(2.941, abs=5e-4)
    assert lone([0.7] * 5, 0.07).speedup(5) == pytest.approx(2.179, abs=5e-4)
    linear = (5 * 0.7 + 1) / (1 + 5 * 0.07)
    assert linear == pytest.approx(3.33, abs=5e-3)  # and wrong


def test_expected_tokens_are_what_a_simulation_gives():
    rng = random.Random(4)

    def drawn(length: int, alpha: float) -> int:
        accepted = 0
        while accepted < length and rng.random() < alpha:
            accepted += 1
        return accepted + 1

    mean = sum(drawn(4, 0.75) for _ in range(40_000)) / 40_000
    assert expected_tokens(0.75, 4) == pytest.approx(mean, rel=0.01)


def test_the_ends_of_the_scale():
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(0.999999999, 7) == pytest.approx(8)
    assert expected_tokens(0.5, 0) == 1
    assert expected_tokens_by_rates([]) == 1
    assert lone([1.0] * 12, 0.0).best_length == 12
    assert lone([0.0] * 12, 0.0).best_length == 0


@given(probabilities, st.integers(0, 20))
def test_rates_that_are_all_the_same(alpha, length):
    by_rates = expected_tokens_by_rates([alpha] * length)
    assert by_rates == pytest.approx(expected_tokens(alpha, length))


@given(probabilities, st.integers(1, 20))
def test_alpha_from_a_mean_length(alpha, length):
    found = acceptance_probability(expected_tokens(alpha, length), length)
    assert expected_tokens(found, length) == pytest.approx(expected_tokens(alpha, length))
    if length < 8:  # beyond, tokens hardly change with small probabilities
        assert found == pytest.approx(alpha, abs=1e-6)


def test_impossible_mean_lengths():
    for mean, length in ((0.9, 3), (4.1, 3), (1.0, 0)):
        with pytest.raises(ValueError, match="tokens a step"):
            acceptance_probability(mean, length)


def test_the_rate_of_acceptance_is_not_alpha():
    rate = (expected_tokens(0.8, 5) - 1) / 5
    assert rate == pytest.approx(0.5379, abs=1e-4)


def test_rates_of_what_servers_report():
    rates = rates_of_shares([0.8, 0.4, 0.4, 0.0, 0.0])
    assert rates == pytest.approx([0.8, 0.5, 1.0, 0.0, 0.0])
    assert expected_tokens_by_rates(rates) == pytest.approx(1 + 0.8 + 0.4 + 0.4)
    with pytest.raises(ValueError, match="cannot grow"):
        rates_of_shares([0.4, 0.5])


@given(probabilities, st.floats(0.0, 2.0))
def test_some_length_is_faster_just_where_alpha_is_above_the_cost(alpha, cost):
    if abs(alpha - cost) > 1e-9:
        forecast = lone([alpha] * 64, cost)
        assert (forecast.best_length > 0) == (alpha > cost)  # Corollary 3.9


@given(st.lists(probabilities, max_size=12), st.floats(0.0, 0.5))
def test_no_length_is_faster_than_the_best(rates, cost):
    forecast = lone(rates, cost)
    speeds = [
        expected_tokens_by_rates(rates[:length]) / (1 + length * cost)
        for length in range(len(rates) + 1)
    ]
    assert speeds[forecast.best_length] == pytest.approx(max(speeds))


# -- batches --------------------------------------------------------------------------------------


def test_batches_make_it_dearer():
    step, tokens = linear_step(0.16), expected_tokens(0.7, 3)
    speeds = [batched_speedup(tokens, 3, batch, step) for batch in (1, 2, 4, 8, 16)]
    assert speeds[0] == pytest.approx(tokens / 1.48)
    assert speeds == sorted(speeds, reverse=True)
    batch = break_even_batch(tokens, 3, step)
    assert batch is not None
    assert (
        batched_speedup(tokens, 3, batch, step) <= 1 < batched_speedup(tokens, 3, batch - 1, step)
    )


def test_free_rows_have_no_break_even():
    assert break_even_batch(2.0, 3, linear_step(0.0)) is None
    assert batched_speedup(2.0, 3, 32, linear_step(0.0)) == 2.0


def test_the_cost_of_drafting_counts_for_each_drafted_token():
    step = linear_step(0.1)
    plain, drafted = step(4, 1), step(4, 3)
    assert batched_speedup(2.0, 2, 4, step, lambda batch: 0.05 * batch) == pytest.approx(
        2.0 * plain / (drafted + 2 * 0.2)
    )
    # A lone request with free rows is the formula of one.
    assert batched_speedup(2.5, 3, 1, linear_step(0.0), lambda batch: 0.05) == pytest.approx(
        2.5 / (1 + 3 * 0.05)
    )


def test_drafts_that_never_pay_break_even_at_once():
    assert break_even_batch(1.0, 3, linear_step(0.1)) == 1


# -- how much to draft ----------------------------------------------------------------------------


def stairs(rows: int) -> float:
    """Rows come in fours: the fifth costs, the sixth does not."""
    return 1.0 + 0.3 * ((rows - 1) // 4)


def brute_force(chains, step_cost, rows, tokens) -> float:
    """Tokens a second of the best of all choices."""
    return max(
        (
            tokens
            + sum(
                expected_tokens_by_rates(chain[:n]) - 1
                for chain, n in zip(chains, lengths, strict=True)
            )
        )
        / step_cost(rows + sum(lengths))
        for lengths in product(*(range(len(chain) + 1) for chain in chains))
    )


@given(st.lists(probabilities, max_size=10), st.floats(0.0, 0.5))
def test_one_chain(chain, row_cost):
    for cost in (lambda rows: 1.0 + row_cost * (rows - 1), stairs):
        (shared,) = best_drafts([chain], cost)
        speed = expected_tokens_by_rates(chain[:shared]) / cost(shared + 1)
        assert speed == pytest.approx(brute_force([chain], cost, 1, 1))


@given(st.lists(chains, min_size=1, max_size=4), st.floats(0.0, 0.3), st.integers(0, 5))
def test_chains_that_share_a_step(chains, row_cost, others):
    rows, tokens = len(chains) + 2 * others, len(chains) + others
    for cost in (lambda rows: 1.0 + row_cost * (rows - 1), stairs):
        lengths = best_drafts(chains, cost, rows, tokens)
        assert all(n <= len(chain) for n, chain in zip(lengths, chains, strict=True))
        gained = sum(
            expected_tokens_by_rates(chain[:n]) - 1
            for n, chain in zip(lengths, chains, strict=True)
        )
        speed = (tokens + gained) / cost(rows + sum(lengths))
        assert speed == pytest.approx(brute_force(chains, cost, rows, tokens))


def test_likely_tokens_of_one_request_go_before_unlikely_ones_of_another():
    lengths = best_drafts([[0.9, 0.9, 0.9], [0.1, 0.1]], lambda rows: 1.0 + 0.2 * (rows - 2))
    assert lengths == [3, 0]
    assert best_drafts([], lambda rows: 1.0, num_rows=4, num_tokens=4) == []


def test_a_step_of_any_size_costs_the_same_so_all_is_drafted():
    assert best_drafts([[0.5] * 6], lambda rows: 1.0) == [6]
    assert best_drafts([[0.5, 0.0, 0.5]], lambda rows: 1.0) == [1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_tokens(1.1, 2),
        lambda: expected_tokens(-0.1, 2),
        lambda: expected_tokens(float("nan"), 2),
        lambda: expected_tokens(0.5, -1),
        lambda: expected_tokens_by_rates([0.5, 2.0]),
        lambda: operations_factor(2.0, 2, -1.0),
        lambda: linear_step(float("nan")),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError):
        call()
