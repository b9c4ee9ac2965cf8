"""The steps of sampling, on vectors of a few elements with visible answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from octavo.runtime import logits as steps

INF = math.inf
LN = math.log


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.fixture
def floats(device):
    return lambda values: torch.tensor(values, dtype=torch.float32, device=device)


@pytest.fixture
def doubles(device):
    return lambda values: torch.tensor(values, dtype=torch.float64, device=device)


@pytest.fixture
def ints(device):
    return lambda values: torch.tensor(values, dtype=torch.int64, device=device)


@pytest.fixture
def from_probs(floats):
    """Logits of the given probabilities, 0 as -inf."""
    return lambda rows: floats([[LN(p) if p > 0 else -INF for p in row] for row in rows])


def kept(logits: torch.Tensor) -> list[list[int]]:
    """Ids that are not cut, by row."""
    return [[i for i, x in enumerate(row) if x > -INF] for row in logits.tolist()]


# ---- Constraints


def test_a_mask_is_of_the_rows_that_are_named(floats, ints):
    logits = floats([[1, 2, 3, 4], [5, 6, 7, 8], [1, -INF, 3, 4]])
    bits = torch.tensor([[0b1010], [0b0011]], dtype=torch.uint8, device=logits.device)
    out = steps.apply_mask(logits, ints([0, 2]), bits)
    assert out.tolist() == [[-INF, 2, -INF, 4], [5, 6, 7, 8], [1, -INF, -INF, -INF]]
    assert logits.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [1, -INF, 3, 4]]


def test_bits_of_a_mask_lie_lowest_first_and_may_be_too_many(floats, ints):
    vocab_size = 35
    words = [0x80000001, 0xFFFFFFFC]  # not 1 to 30, not 32 and 33
    bits = torch.from_numpy(np.array([words], dtype="<u4").view(np.uint8)).to(ints([0]).device)
    out = steps.apply_mask(floats([[1] * vocab_size]), ints([0]), bits)
    assert [i for i, x in enumerate(out[0].tolist()) if x == 1] == [0, 31, 34]


def test_logit_bias_is_added_and_cannot_revive_a_masked_token(floats, ints):
    logits = floats([[1, 2, 3, -INF], [5, 6, 7, 8]])
    out = steps.apply_logit_bias(logits, ints([0, 0, 1]), ints([0, 3, 2]), floats([10, 100, -7]))
    assert out.tolist() == [[11, 2, 3, -INF], [5, 6, 0, 8]]


@pytest.mark.parametrize(
    ("repetition", "frequency", "presence", "expected"),
    [
        (1.0, 0.0, 0.0, [4, -2, 3, 1]),
        (2.0, 0.0, 0.0, [2, -4, 3, 1]),  # token 1 is in the prompt alone
        (1.0, 0.5, 0.0, [2.5, -2, 3, 1]),  # three occurrences of token 0
        (1.0, 0.0, 0.5, [3.5, -2, 3, 1]),
        (2.0, 0.5, 0.25, [0.25, -4, 3, 1]),
        (0.5, 0.0, -1.0, [9, -1, 3, 1]),
    ],
)
def test_penalties(floats, ints, repetition, frequency, presence, expected):
    logits = floats([[9, 9, 9, 9], [4, -2, 3, 1]])
    out = steps.apply_penalties(
        logits,
        ints([1, 1]),
        ints([0, 1]),
        ints([3, 0]),
        floats([5.0, repetition]),
        floats([5.0, frequency]),
        floats([5.0, presence]),
    )
    assert out.tolist() == [[9, 9, 9, 9], expected]


def test_penalties_keep_masked_tokens_masked(floats, ints):
    one = floats([1.5])
    out = steps.apply_penalties(
        floats([[-INF, 0, 1, 2]]), ints([0]), ints([0]), ints([2]), one, one, one
    )
    assert out.tolist() == [[-INF, 0, 1, 2]]


# ---- Distributions


def test_temperature_is_relative_to_the_maximum(floats):
    logits = floats([[1, 2, 3, -INF], [-4, 0, 4, 2]])
    out = steps.apply_temperature(logits, floats([0.5, 2.0]))
    assert out.tolist() == [[-4, -2, 0, -INF], [-4, -2, 0, -1]]


def test_tiny_temperature_on_large_logits_does_not_overflow(floats):
    out = steps.apply_temperature(floats([[3e38, -3e38, 3e38, 0]]), floats([1e-5]))
    assert steps.token_weights(out).tolist() == [[2**44, 0, 2**44, 0]]


def test_min_p_is_relative_to_the_most_likely(from_probs, doubles):
    logits = from_probs([[0.4, 0.3, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01], [0, 0.5, 0.5, 0]])
    assert kept(steps.apply_min_p(logits, doubles([0.3, 0.1, 1.0]))) == [[0, 1, 2], [0], [1, 2]]


def test_typical_p_can_cut_the_most_likely_token(from_probs, doubles):
    # Entropy 1.23 nats; -log p is 0.69, 1.39, 1.90, 2.30: distances 0.54, 0.16, 0.66, 1.07.
    logits = from_probs([[0.5, 0.25, 0.15, 0.10]] * 4)
    out = steps.apply_typical_p(logits, doubles([0.2, 0.3, 0.8, 0.95]))
    assert kept(out) == [[1], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_typical_p_ignores_masked_tokens_and_scale(from_probs, doubles):
    logits = from_probs([[0, 0.5, 0.25, 0.15, 0.10]])
    assert kept(steps.apply_typical_p(logits + 7, doubles([0.2]))) == [[2]]


def test_top_k_counts_places(floats, ints):
    ranked = floats([[4, 3, 3, 1]] * 4)
    out = steps.apply_top_k(ranked, ints([1, 2, 3, 9]))
    assert kept(out) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_top_p_keeps_the_token_that_crosses(from_probs, doubles):
    ranked = from_probs([[0.4, 0.3, 0.2, 0.1]] * 5)
    out = steps.apply_top_p(ranked, doubles([0.0, 0.39, 0.41, 0.71, 1.0]))
    assert kept(out) == [[0], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_top_p_of_a_head_counts_the_tail(from_probs, doubles):
    head = from_probs([[0.4, 0.3]] * 2)
    weights = steps.token_weights(from_probs([[0.4, 0.3, 0.2, 0.1]])).sum(-1)
    out = steps.apply_top_p(head, doubles([0.5, 0.5]), torch.cat([weights, weights * 0]))
    # 0.5 of all is more than the first token's 0.4; 0.5 of the head's 0.7 is not.
    assert kept(out) == [[0, 1], [0]]


# ---- Order, weights, drawing


def test_most_likely_orders_equals_by_id(floats):
    logits = floats([[1, 3, 3, 2], [0, 0, 0, 0], [-INF, -1, -2, -1], [-0.0, 0.0, -1e-40, 1e-40]])
    ranked = steps.most_likely(logits, 4)
    assert ranked.token_ids.tolist() == [[1, 2, 3, 0], [0, 1, 2, 3], [1, 3, 2, 0], [3, 0, 1, 2]]
    assert ranked.logits.tolist()[2] == [-1, -1, -2, -INF]


def test_most_likely_equals_a_stable_sort(device):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 1000, generator=generator).mul(3).round().to(device)  # many ties
    values, ids = logits.sort(stable=True, dim=-1, descending=True)
    for num in (0, 1, 50, 250, 251, 1000):
        ranked = steps.most_likely(logits, num)
        assert torch.equal(ranked.logits, values[:, :num])
        assert torch.equal(ranked.token_ids, ids[:, :num])


@pytest.mark.parametrize("vocab_size", [1, 4, 511, 512, 513, 1023, 1024, 49_152, 50_257])
def test_highest_is_the_first_maximum(device, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(0, 50, (9, vocab_size), generator=generator).float().to(device)
    logits[0] = -INF
    logits[1] = 7.0
    logits[2, -1] = 99.0
    logits[3, vocab_size // 2] = math.nan
    peaks, ids = steps.highest(logits)
    assert ids[2].item() == vocab_size - 1
    assert math.isnan(peaks[3].item())
    for row in (0, 1, 2, 4, 5, 6, 7, 8):
        values = logits[row].tolist()
        assert peaks[row].item() == max(values)
        assert ids[row].item() == values.index(max(values))


def test_weights_are_fixed_point_probabilities(floats):
    weights = steps.token_weights(floats([[LN(2), 0, -INF, LN(2) - 40]]))
    assert weights.dtype == torch.int64
    assert weights[0, 0].item() == 2**44
    assert weights[0, 1].item() == pytest.approx(2**43, rel=1e-6)
    assert weights[0, 2:].tolist() == [0, 0]


def test_weights_of_the_largest_vocabulary_do_not_overflow():
    total = steps.token_weights(torch.zeros(1, steps.MAX_VOCAB_SIZE)).sum(-1)
    assert total.item() == steps.MAX_VOCAB_SIZE * 2**44


def test_draw_inverts_the_distribution_function(ints, doubles):
    weights = ints([[0, 1, 0, 3]] * 6)
    below_one = math.nextafter(1.0, 0.0)
    columns = steps.draw(weights, doubles([0.0, 0.2499, 0.25, 0.5, 0.9999, below_one]))
    assert columns.tolist() == [1, 1, 3, 3, 3, 3]


def test_draw_never_passes_the_last_token(ints, doubles):
    totals = [2**k + d for k in (0, 1, 44, 52, 53, 54, 60, 61, 62) for d in (-1, 0, 1, 127, 129)]
    totals = [total for total in totals if total > 0]
    weights = ints([[total, 0] for total in totals])
    largest = doubles([math.nextafter(1.0, 0.0)] * len(totals))
    assert steps.draw(weights, largest).tolist() == [0] * len(totals)


def test_exp_does_not_depend_on_the_place_in_the_tensor(device):
    # What bitwise independence of rows stands on: vector bodies and scalar tails of the
    # library's loops must agree, at every alignment, for every length.
    generator = torch.Generator().manual_seed(0)
    values = -45 * torch.rand(200_000, generator=generator).to(device)
    whole = values.exp()
    for start in range(40):
        for length in (1, 7, 33, 1000, 100_001):
            piece = values[start : start + length]
            assert torch.equal(piece.exp(), whole[start : start + length])
            assert torch.equal(piece.clone().exp_(), whole[start : start + length])
