from __future__ import annotations

import random

import pytest

from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.speculation.step_times import ROW_COST, StepTimeEstimator


def step(*drafted: int, prompt: int = 0, num_steps: int = 1) -> Batch:
    """A step with a request for each number of drafted tokens, and maybe a chunk of a prompt."""
    request = Request("a", [1] * 100, SamplingParams(), 0.0)
    items = [
        ScheduledRequest(request, 50, 1 + n, 1 + n, Draft.chain(range(n)) if n else None)
        if num_steps == 1
        else ScheduledRequest(request, 50, 1, num_steps)
        for n in drafted
    ]
    if prompt:
        items.append(ScheduledRequest(request, 0, prompt, 0))
    return Batch(0, tuple(items))


def test_before_anything_is_measured_rows_cost_what_they_mostly_do():
    times = StepTimeEstimator()
    assert not times.is_known
    assert times.seconds(1) == 1.0 and times.seconds(6) == pytest.approx(1 + 5 * ROW_COST)


def test_one_measurement_gives_the_scale():
    times = StepTimeEstimator()
    times.observe(step(0), 0.01)
    assert times.seconds(1) == pytest.approx(0.01)
    assert times.seconds(6) == pytest.approx(0.01 * (1 + 5 * ROW_COST), rel=0.01)


@pytest.mark.parametrize("row_cost", [0.03, 0.16, 0.5])
def test_the_cost_of_rows_is_learned(row_cost):
    rng = random.Random(1)
    times = StepTimeEstimator()
    for _ in range(300):
        drafted = rng.choice([0, 0, 1, 2, 4])
        times.observe(step(drafted), 0.005 * (1 + row_cost * drafted) * rng.uniform(0.9, 1.1))
    for rows in (1, 2, 3, 5, 4, 8):  # the last two were never seen
        assert times.seconds(rows) == pytest.approx(0.005 * (1 + row_cost * (rows - 1)), rel=0.08)


def test_costs_need_not_be_on_a_line():
    """Kernels take rows in blocks: a fifth may cost more than the four before it together."""
    cost = {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.15, 5: 2.0}
    times = StepTimeEstimator()
    for _ in range(60):
        for rows, seconds in cost.items():
            times.observe(step(rows - 1), seconds)
    for rows, seconds in cost.items():
        assert times.seconds(rows) == pytest.approx(seconds, rel=0.12)


def test_a_disturbed_step_is_forgotten():
    times = StepTimeEstimator()
    times.observe(step(3), 5.0)
    for _ in range(400):
        times.observe(step(0), 0.005)
    assert times.seconds(4) < 0.005 * 4


def test_steps_with_prompts_and_rounds_say_nothing():
    times = StepTimeEstimator()
    times.observe(step(0, prompt=30), 1.0)
    times.observe(step(0, num_steps=4), 1.0)
    assert not times.is_known
    times.observe(step(0, 2), 1.0)
    assert times.is_known


def test_more_rows_never_cost_less_where_nothing_was_seen():
    rng = random.Random(2)
    times = StepTimeEstimator()
    for _ in range(50):
        times.observe(step(rng.randint(0, 3)), rng.uniform(0.5, 1.5))
    costs = [times.seconds(rows) for rows in range(8, 40)]
    assert costs == sorted(costs)
