"""Vectors made of hidden states, in one piece or in chunks."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.pooling_params import PoolingInput, PoolingParams
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.models.pooling import METHODS, Pooling
from octavo.runtime.pooler import Pooler

ROWS = np.random.default_rng(0).normal(size=(37, 24)).astype(np.float32)
EXPECTED = {
    "cls": ROWS[0],
    "last": ROWS[-1],
    "mean": ROWS.mean(0),
    "mean_sqrt_len": ROWS.sum(0) / 37**0.5,
    "max": ROWS.max(0),
    "weighted_mean": (ROWS * np.arange(1, 38)[:, None]).sum(0) / sum(range(1, 38)),
}


def request(params, name="a"):
    return Request(name, [1] * len(ROWS), SamplingParams(), 0.0, pooling=PoolingInput(params))


def pool(pooler, params, cuts=()):
    """The result of ROWS, given to the pooler in chunks that end at ``cuts``."""
    one, results = request(params), []
    for start, end in zip((0, *cuts), (*cuts, len(ROWS)), strict=True):
        results.append(pooler.take(one, start, ROWS[start:end]))
    assert all(result is None for result in results[:-1])
    return results[-1]


@pytest.mark.parametrize("method", METHODS)
def test_methods_and_chunks(method):
    pooler = Pooler(Pooling(methods=(method,), normalize=False), (), 24)
    whole = pool(pooler, PoolingParams())
    assert whole == pytest.approx(EXPECTED[method], abs=1e-5)
    for cuts in ((1,), (16, 32), (5, 6, 7), (36,)):
        assert np.array_equal(pool(pooler, PoolingParams(), cuts), whole)


def test_several_methods_are_joined():
    pooler = Pooler(Pooling(methods=("cls", "mean"), normalize=False), (), 48)
    expected = np.concatenate([EXPECTED["cls"], EXPECTED["mean"]])
    assert pool(pooler, PoolingParams(), (8,)) == pytest.approx(expected, abs=1e-6)


def test_every_token_has_its_vector():
    pooler = Pooler(Pooling(methods=("mean",)), (), 24)
    raw = pool(pooler, PoolingParams("token_embed", use_activation=False), (8, 9))
    assert np.array_equal(raw, ROWS)
    lengths = np.linalg.norm(pool(pooler, PoolingParams("token_embed", dimensions=4)), axis=1)
    assert lengths == pytest.approx(np.ones(37), abs=1e-6)


def test_requests_do_not_mix_and_are_forgotten():
    pooler = Pooler(Pooling(methods=("mean",), normalize=False), (), 24)
    one, other = request(PoolingParams(), "one"), request(PoolingParams(), "other")
    assert pooler.take(one, 0, ROWS[:20]) is pooler.take(other, 0, -ROWS[:20]) is None
    pooler.forget(["one"])
    assert pooler.take(one, 0, ROWS[:20]) is None  # from the beginning, as after a preemption
    assert pooler.take(one, 20, ROWS[20:]) == pytest.approx(EXPECTED["mean"], abs=1e-6)
    assert pooler.take(other, 20, -ROWS[20:]) == pytest.approx(-EXPECTED["mean"], abs=1e-6)


def test_a_chunk_that_comes_again_counts_once():
    pooler, one = (
        Pooler(Pooling(methods=("mean",), normalize=False), (), 24),
        request(PoolingParams()),
    )
    for start, end in ((0, 20), (20, 30), (20, 30)):
        assert pooler.take(one, start, ROWS[start:end]) is None
    assert pooler.take(one, 30, ROWS[30:]) == pytest.approx(EXPECTED["mean"], abs=1e-6)


def test_scores_go_through_the_models_activation():
    outputs = np.array([2.0, -1.0, 0.0], np.float32)
    for activation, expected in (
        ("identity", outputs),
        ("sigmoid", 1 / (1 + np.exp(-outputs))),
        ("softmax", np.exp(outputs) / np.exp(outputs).sum()),
    ):
        pooling = Pooling(methods=("cls",), labels=("a", "b", "c"), activation=activation)
        pooler = Pooler(pooling, (lambda vector: outputs,), 3)
        assert pool(pooler, PoolingParams("classify")) == pytest.approx(expected, abs=1e-6)
        raw = pool(pooler, PoolingParams("classify", use_activation=False))
        assert np.array_equal(raw, outputs)
