"""Coefficients of steps, from steps whose coefficients are known."""

from __future__ import annotations

import random
from statistics import fmean

import numpy as np
import pytest
from scipy.optimize import nnls

from octavo.base.errors import BenchmarkError
from octavo.calibration.fit import TimedStep, fit, nonnegative_least_squares
from octavo.cost.step_cost import StepFeatures
from octavo.cost.work import Span, passes

STEP, SEQUENCE, PASS, ROW, KEY, SCORE = 2e-4, 1e-5, 2e-3, 2e-5, 1e-8, 3e-10


def features_of(spans: list[Span], num_multi_steps: int = 1) -> tuple[StepFeatures, ...]:
    return tuple(StepFeatures.of(rows) for rows in passes(spans, num_multi_steps))


def true_seconds(made: tuple[StepFeatures, ...]) -> float:
    return (
        STEP
        + SEQUENCE * made[0].num_seqs
        + sum(
            PASS + ROW * each.num_tokens + KEY * each.decode_keys + SCORE * each.prompt_scores
            for each in made
        )
    )


def steps(noise: float = 0.0, seed: int = 0) -> list[TimedStep]:
    """Multi-step decoding, batches that decode, prompts, and both."""
    rng = random.Random(seed)
    shapes: list[tuple[list[Span], int]] = []
    for _ in range(60):
        decoding = [Span(rng.randrange(2000), 1) for _ in range(rng.randint(1, 32))]
        prompt = Span(rng.choice((0, 256)), rng.randint(2, 500), rng.randint(0, 1))
        shapes += [(decoding, 1), ([prompt], 1), ([*decoding, prompt], 1)]
        shapes.append(([decoding[0]], rng.randint(1, 8)))
    made = [features_of(spans, num_steps) for spans, num_steps in shapes]
    return [TimedStep(each, true_seconds(each) * rng.lognormvariate(0, noise)) for each in made]


def predicted(measured, made: tuple[StepFeatures, ...]) -> float:
    once = measured.step_s + measured.sequence_s * made[0].num_seqs
    return once + sum(measured.seconds(each) for each in made)


@pytest.mark.parametrize(("noise", "mean", "largest"), [(0.0, 2e-4, 1e-3), (0.05, 0.015, 0.1)])
def test_steps_that_were_never_seen_are_foreseen(noise, mean, largest):
    measured = fit(steps(noise))
    errors = [abs(predicted(measured, s.passes) / s.seconds - 1) for s in steps(seed=1)]
    assert fmean(errors) < mean
    assert max(errors) < largest


def test_beyond_what_was_seen_lines_go_on():
    measured = fit(steps())
    far = features_of([Span(0, 2000, 0)])
    assert predicted(measured, far) == pytest.approx(true_seconds(far), rel=0.01)


def test_what_comes_once_is_told_from_what_each_pass_takes():
    measured = fit(steps())
    assert measured.step_s == pytest.approx(STEP, rel=1e-3)
    assert measured.sequence_s == pytest.approx(SEQUENCE, rel=1e-3)
    assert measured.seconds_of["prompt_score"] == pytest.approx(SCORE, rel=1e-3)


def test_disturbed_steps_do_not_count():
    some = steps(0.02)
    for place in range(0, len(some), 12):
        some[place] = TimedStep(some[place].passes, some[place].seconds * 10)
    measured = fit(some)
    for step in steps(seed=1):
        assert predicted(measured, step.passes) == pytest.approx(step.seconds, rel=0.05)


def test_nine_of_ten_steps_are_in_their_interval():
    measured = fit(steps(0.1))
    inside = []
    for step in steps(0.1, seed=2):
        (features, *others) = step.passes
        if not others:
            once = measured.step_s + measured.sequence_s * features.num_seqs
            foreseen = measured.prediction(features)
            inside.append(foreseen.low <= step.seconds - once <= foreseen.high)
    assert 0.8 < fmean(inside) < 0.98


def test_intervals_are_as_wide_as_steps_differ():
    spreads = fit(steps(0.1)).spreads
    assert set(spreads) == {"decode", "prompt", "mixed"}
    for spread in spreads.values():
        assert 0.7 < spread.low < 0.95 < 1.05 < spread.high < 1.4


def test_too_few_steps_are_an_error():
    with pytest.raises(BenchmarkError, match="too few to learn from"):
        fit(steps()[:5])


@pytest.mark.parametrize("seed", range(20))
def test_the_least_squares_are_those_of_scipy(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(30, 8)), rng.normal(size=30)
    a[:, 3] = a[:, 2]  # what cannot be told apart
    found, (expected, residual) = nonnegative_least_squares(a, b), nnls(a, b)
    assert (found >= 0).all()
    assert np.linalg.norm(a @ found - b) == pytest.approx(residual, rel=1e-6)
    assert np.allclose(a @ found, a @ expected, atol=1e-6)
