"""What ``sample`` draws, against the exact distribution, by G-test.

The expected distribution comes from ``reference``: plain Python over lists, with nothing of
octavo in it. Numbers are counter-based, so a test that passes once passes always; the level of
all G-tests together is 1e-4 (Bonferroni).
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import Bits, create_mask
from octavo.runtime.sampler import SamplingRow, sample

NUM_DRAWS = 30_000
FAMILY_ALPHA = 1e-4
NUM_G_TESTS = 64  # an upper bound of how many this file makes
MIN_EXPECTED = 10  # rarer tokens are counted together

Request = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Rows of a few tokens are not worth the threads' waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(logits: list[float], request: Request) -> list[float]:
    """Probability of each token, step by step as the field defines the parameters."""
    vocab = range(len(logits))
    prompt, output = request.get("prompt", []), request.get("output", [])
    x = list(logits)
    if "allowed_token_ids" in request:
        x = [x[i] if i in request["allowed_token_ids"] else -math.inf for i in vocab]
    for *prefix, last in request.get("bad_words", []):
        if output[len(output) - len(prefix) :] == prefix and len(prefix) <= len(output):
            x[last] = -math.inf
    if len(output) < request.get("min_tokens", 0):
        for i in request.get("stop", []):
            x[i] = -math.inf
    for i, bias in request.get("logit_bias", {}).items():
        x[i] += bias
    repetition = request.get("repetition_penalty", 1.0)
    for i in set(prompt) | set(output):
        x[i] = x[i] / repetition if x[i] > 0 else x[i] * repetition
    for i, count in Counter(output).items():
        x[i] -= request.get("frequency_penalty", 0.0) * count + request.get("presence_penalty", 0.0)

    for i, penalty in request.get("repeating", {}).items():
        x[i] -= penalty
    if "top_n_sigma" in request:
        spread = statistics.pstdev(value for value in x if value > -math.inf)
        least = max(x) - request["top_n_sigma"] * spread
        x = [value if value >= least else -math.inf for value in x]
    x = [value / request.get("temperature", 1.0) for value in x]
    p = _normalized([math.exp(value - max(x)) for value in x])
    if "min_p" in request:
        p = _normalized([q if q >= request["min_p"] * max(p) else 0.0 for q in p])
    if "typical_p" in request:
        entropy = -math.fsum(q * math.log(q) for q in p if q > 0)
        by_distance = sorted(
            (i for i in vocab if p[i] > 0), key=lambda i: abs(-math.log(p[i]) - entropy)
        )
        p = _normalized(_head(p, by_distance, request["typical_p"]))
    by_probability = sorted(vocab, key=lambda i: (-p[i], i))
    if "top_k" in request:
        kept = by_probability[: request["top_k"]]
        p = _normalized([p[i] if i in kept else 0.0 for i in vocab])
    if "top_p" in request:
        p = _normalized(_head(p, by_probability, request["top_p"]))
    top = [i for i in by_probability if 0 < p[i] >= request.get("xtc_threshold", 0.1)]
    if "xtc_probability" in request and len(top) > 1:
        without = _normalized([0.0 if i in top[:-1] else p[i] for i in vocab])
        share = request["xtc_probability"]
        p = [share * cut + (1 - share) * q for cut, q in zip(without, p, strict=True)]
    return p


def _normalized(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


def _head(p: list[float], order: list[int], mass: float) -> list[float]:
    """The first tokens of an order, until they hold ``mass``."""
    kept, held = set(), 0.0
    for i in order:
        if held >= mass:
            break
        kept.add(i)
        held += p[i]
    return [q if i in kept else 0.0 for i, q in enumerate(p)]


def bits_after(params: SamplingParams, output, stop=(), bad_words=()) -> Bits | None:
    """Which tokens may come after ``output``, of more than any vocabulary of these tests has."""
    mask = create_mask(params, 2**16, stop, bad_words)
    if mask is None:
        return None
    mask.advance(output)
    return mask.bitmask()


def drawn_counts(logits: list[float], request: Request, num: int = NUM_DRAWS) -> np.ndarray:
    """How often each token is drawn, over as many counters as draws."""
    request = dict(request)
    counter = request.pop("counter", "seed")
    prompt, output = request.pop("prompt", []), request.pop("output", [])
    stop, bad_words = request.pop("stop", ()), request.pop("bad_words", [])
    repeating = request.pop("repeating", None)
    params = SamplingParams(**request)
    bits = bits_after(params, output, stop, bad_words)
    rows = [
        SamplingRow(
            params,
            i if counter == "seed" else 1234,
            i if counter == "sample" else 0,
            prompt,
            range(i) if counter == "position" else output,
            bits,
            repeating=repeating,
        )
        for i in range(num)
    ]
    sampled = sample(torch.tensor(logits, dtype=torch.float32).repeat(num, 1), rows)
    assert sampled.errors == {}
    return np.bincount(sampled.token_ids, minlength=len(logits))


def g_test(counts: np.ndarray, p: list[float]) -> float:
    """p-value of the likelihood-ratio test of counts against a distribution."""
    expected = np.array(p) * counts.sum()
    rare = expected < MIN_EXPECTED
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    terms = np.where(observed > 0, observed * np.log(np.maximum(observed, 1) / expected), 0.0)
    return float(stats.chi2.sf(2 * terms.sum(), len(expected) - 1))


def assert_drawn_as_expected(logits: list[float], request: Request) -> None:
    expected = reference(logits, request)
    counts = drawn_counts(logits, request)
    impossible = [i for i, q in enumerate(expected) if q == 0.0]
    assert counts[impossible].sum() == 0, "a masked token was drawn"
    assert g_test(counts, expected) > FAMILY_ALPHA / NUM_G_TESTS


FOUR = [math.log(q) for q in (0.4, 0.1, 0.3, 0.2)]
TEN = [1.3, -0.7, 2.1, 0.4, -2.2, 3.0, 0.9, -1.1, 1.9, 0.0]

FAST = {
    "plain, by seed": (FOUR, {}),
    "plain, by position": (FOUR, {"counter": "position"}),
    "plain, by sample": (FOUR, {"counter": "sample"}),
    "masked by the model": ([0.0, -math.inf, 1.0, -math.inf, 0.5], {}),
    "top_p and top_k": (TEN, {"temperature": 1.3, "top_k": 6, "top_p": 0.8}),
    "everything": (
        TEN,
        {
            "temperature": 1.4,
            "min_p": 0.02,
            "typical_p": 0.95,
            "top_k": 7,
            "top_p": 0.97,
            "prompt": [5, 1],
            "output": [5, 8, 8, 3],
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
            "logit_bias": {4: 3.0, 2: -0.5},
            "bad_words": [(8, 3, 9), (1,)],
        },
    ),
}

SLOW = {
    "temperature 0.3": (TEN, {"temperature": 0.3}),
    "temperature 0.8": (TEN, {"temperature": 0.8, "counter": "position"}),
    "temperature 3": (TEN, {"temperature": 3.0}),
    "temperature 100": (TEN, {"temperature": 100.0, "counter": "sample"}),
    "top_k 2": (TEN, {"top_k": 2}),
    "top_k 5": (TEN, {"top_k": 5, "counter": "position"}),
    "top_k of all": (TEN, {"top_k": 10}),
    "top_k with ties": ([0.0, 1.0, 1.0, 1.0, 0.0], {"top_k": 2}),
    "top_p 0.3": (TEN, {"top_p": 0.3}),
    "top_p 0.6": (TEN, {"top_p": 0.6, "counter": "sample"}),
    "top_p 0.95": (TEN, {"top_p": 0.95}),
    "top_p 0.999": (TEN, {"top_p": 0.999, "temperature": 2.0}),
    "top_p on renormalized top_k": (FOUR, {"top_k": 2, "top_p": 0.55}),
    "min_p 0.05": (TEN, {"min_p": 0.05}),
    "min_p 0.3": (TEN, {"min_p": 0.3, "counter": "position"}),
    "min_p after temperature": (TEN, {"min_p": 0.3, "temperature": 2.5}),
    "typical_p 0.2": (TEN, {"typical_p": 0.2}),
    "typical_p 0.6": (TEN, {"typical_p": 0.6}),
    "typical_p 0.9": (TEN, {"typical_p": 0.9, "temperature": 1.5}),
    "typical_p, then top_k": (TEN, {"typical_p": 0.8, "top_k": 3}),
    "min_p, then typical_p": (TEN, {"min_p": 0.1, "typical_p": 0.7}),
    "top_n_sigma 0.8": (TEN, {"top_n_sigma": 0.8}),
    "top_n_sigma of all that is allowed": (
        TEN,
        {"top_n_sigma": 1.2, "temperature": 2.5, "allowed_token_ids": [0, 1, 4, 7, 9]},
    ),
    "xtc": (TEN, {"xtc_probability": 1.0, "xtc_threshold": 0.08}),
    "xtc at times": (TEN, {"xtc_probability": 0.4, "xtc_threshold": 0.05, "counter": "position"}),
    "xtc with ties": ([0.0, 1.0, 1.0, 1.0, 0.0], {"xtc_probability": 0.7, "xtc_threshold": 0.2}),
    "top_k and top_p, then xtc": (
        TEN,
        {"top_k": 6, "top_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.1},
    ),
    "dry": (TEN, {"dry_multiplier": 1.0, "repeating": {5: 2.0, 0: 0.5, 3: 0.0}}),
    "repetition 1.5": (TEN, {"repetition_penalty": 1.5, "prompt": [5, 4], "output": [0, 0]}),
    "repetition 0.7": (TEN, {"repetition_penalty": 0.7, "prompt": [5, 4], "output": [0, 0]}),
    "frequency": (TEN, {"frequency_penalty": 0.6, "prompt": [5], "output": [2, 2, 2, 8]}),
    "presence": (TEN, {"presence_penalty": 1.1, "prompt": [5], "output": [2, 2, 2, 8]}),
    "negative penalties": (
        TEN,
        {"presence_penalty": -1.0, "frequency_penalty": -0.4, "output": [4, 4]},
    ),
    "logit_bias": (TEN, {"logit_bias": {4: 4.5, 5: -3.0}}),
    "allowed": (TEN, {"allowed_token_ids": [1, 4, 7, 9], "temperature": 0.9}),
    "bad words": (TEN, {"bad_words": [(5,), (0, 2), (1, 8)], "output": [0]}),
    "min_tokens": (TEN, {"min_tokens": 3, "stop": (5, 8), "output": [1, 1]}),
    "bias of a stop token": (TEN, {"min_tokens": 2, "stop": (5,), "logit_bias": {5: 9.0, 0: 1.0}}),
}


@pytest.mark.parametrize("name", FAST)
def test_distribution(name):
    assert_drawn_as_expected(*FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_distribution_of_every_parameter(name):
    assert_drawn_as_expected(*SLOW[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed > 3)) for seed in range(12)]
)
def test_distribution_of_random_settings(seed):
    rng = random.Random(seed)
    logits = [rng.gauss(0, 2) for _ in range(rng.randrange(4, 51))]
    some_ids = [rng.randrange(len(logits)) for _ in range(6)]
    options = {
        "top_k": rng.randrange(1, len(logits)),
        "top_p": rng.uniform(0.2, 0.99),
        "min_p": rng.uniform(0.01, 0.2),
        "typical_p": rng.uniform(0.2, 0.99),
        "repetition_penalty": rng.uniform(0.7, 1.5),
        "frequency_penalty": rng.uniform(-1, 1),
        "presence_penalty": rng.uniform(-1, 1),
        "logit_bias": {some_ids[0]: rng.uniform(-3, 3), some_ids[-1]: 1.0},
    }
    request = {name: options[name] for name in rng.sample(sorted(options), 4)}
    request |= {"temperature": rng.uniform(0.4, 2), "prompt": some_ids[:3], "output": some_ids[2:]}
    assert_drawn_as_expected(logits, request)


# ---- The tests themselves


def test_g_test_notices_a_temperature_off_by_five_percent():
    counts = drawn_counts(TEN, {"temperature": 0.8})
    assert g_test(counts, reference(TEN, {"temperature": 0.8})) > 1e-4
    assert g_test(counts, reference(TEN, {"temperature": 0.84})) < FAMILY_ALPHA / NUM_G_TESTS


def test_g_test_is_uniform_under_the_hypothesis():
    generator = np.random.default_rng(0)
    p = reference(TEN, {})
    values = [g_test(generator.multinomial(20_000, p), p) for _ in range(2000)]
    assert stats.kstest(values, "uniform").pvalue > 1e-4


def test_the_number_of_g_tests_is_within_the_bound():
    assert len(FAST) + len(SLOW) + 12 + 2 <= NUM_G_TESTS


# ---- Draws are independent of each other


@pytest.mark.parametrize("counter", ["seed", "sample", "position"])
def test_neighbouring_draws_are_independent(counter):
    num = 20_000
    rows = [
        SamplingRow(
            SamplingParams(),
            i if counter == "seed" else 9,
            i if counter == "sample" else 0,
            [],
            range(i if counter == "position" else 0),
        )
        for i in range(num)
    ]
    ids = np.array(sample(torch.tensor([FOUR] * num), rows).token_ids)
    table = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16).reshape(4, 4)
    assert stats.chi2_contingency(table, lambda_="log-likelihood").pvalue > 1e-5
