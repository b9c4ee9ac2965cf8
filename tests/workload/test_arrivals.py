"""Arrivals have the distribution that was asked for, and are the same every time."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from itertools import pairwise

import pytest
from scipy import integrate, stats

from octavo.base.errors import ConfigError
from octavo.workload.arrivals import Ramp, arrival_times

NUM = 5000
RAMPS = [
    Ramp("linear", 2, 20),
    Ramp("linear", 20, 2),
    Ramp("linear", 0, 10),
    Ramp("exponential", 1, 50),
    Ramp("exponential", 30, 3),
    Ramp("exponential", 5, 5),
]


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def rate_at(ramp: Ramp, t: float, duration: float) -> float:
    """The rate by its definition, in time."""
    share = min(t / duration, 1.0)
    if ramp.kind == "linear":
        return ramp.start_rps + (ramp.end_rps - ramp.start_rps) * share
    return ramp.start_rps * (ramp.end_rps / ramp.start_rps) ** share


def expected_until(ramp: Ramp, t: float, duration: float) -> float:
    """The integral of that rate, numerically."""
    inside, _ = integrate.quad(lambda s: rate_at(ramp, s, duration), 0, min(t, duration))
    return inside + max(0.0, t - duration) * ramp.end_rps


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_gaps_are_exponential(rate: float, seed: int) -> None:
    sample = gaps(arrival_times(NUM, rate, seed=seed))
    assert stats.kstest(sample, "expon", args=(0, 1 / rate)).pvalue > 0.01


@pytest.mark.parametrize("burstiness", [0.25, 0.7, 3.0, 20.0])
def test_gaps_are_gamma(burstiness: float) -> None:
    rate = 8.0
    sample = gaps(arrival_times(NUM, rate, burstiness=burstiness, seed=3))
    law = stats.gamma(a=burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(sample, law.cdf).pvalue > 0.01
    assert statistics.pstdev(sample) * rate == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_the_test_would_see_a_wrong_rate_and_a_wrong_shape() -> None:
    sample = gaps(arrival_times(NUM, 10.0, seed=0))
    assert stats.kstest(sample, "expon", args=(0, 1 / 10.5)).pvalue < 0.01
    bursty = gaps(arrival_times(NUM, 10.0, burstiness=0.8, seed=0))
    assert stats.kstest(bursty, "expon", args=(0, 1 / 10)).pvalue < 0.01


def test_gaps_are_independent() -> None:
    sample = gaps(arrival_times(NUM, 1.0, seed=5))
    assert abs(stats.pearsonr(sample[:-1], sample[1:]).statistic) < 3 / math.sqrt(NUM)


def test_the_count_in_a_time_has_the_variance_of_poisson() -> None:
    """Which stretching to a fixed end would take away."""

    def counts(rescaled: bool) -> list[int]:
        runs = (arrival_times(100, 10.0, seed=s, rescaled=rescaled) for s in range(400))
        return [sum(t < 8.0 for t in times) for times in runs]

    assert statistics.mean(counts(False)) == pytest.approx(80, abs=1.5)
    assert statistics.variance(counts(False)) == pytest.approx(80, rel=0.25)
    assert statistics.variance(counts(True)) < 30  # a binomial: 100 * 0.8 * 0.2


def test_a_metronome() -> None:
    assert arrival_times(4, 2.0, burstiness=math.inf) == [0.5, 1.0, 1.5, 2.0]


def test_all_at_once() -> None:
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]
    assert arrival_times(0, 5.0) == []


def test_the_first_comes_after_a_gap() -> None:
    firsts = [arrival_times(1, 4.0, seed=seed)[0] for seed in range(2000)]
    assert stats.kstest(firsts, "expon", args=(0, 0.25)).pvalue > 0.01


def test_rescaled_ends_when_it_was_said() -> None:
    plain, rescaled = (arrival_times(50, 4.0, seed=9, rescaled=r) for r in (False, True))
    assert rescaled[-1] == pytest.approx(50 / 4.0)
    assert plain[-1] != pytest.approx(50 / 4.0, rel=1e-3)
    assert [t / rescaled[-1] for t in rescaled] == pytest.approx([t / plain[-1] for t in plain])


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_a_ramp_is_exponential_on_its_own_clock(ramp: Ramp) -> None:
    """The time-rescaling theorem, with the integral taken anew."""
    num = 3000
    times = arrival_times(num, math.inf, ramp=ramp, seed=1)
    duration = ramp.duration_s(num)
    rescaled = [expected_until(ramp, t, duration) for t in times]
    assert stats.kstest(gaps(rescaled), "expon").pvalue > 0.01
    if ramp.start_rps != ramp.end_rps:  # and on the wall clock it is not
        rate = num / times[-1]
        assert stats.kstest(gaps(times), "expon", args=(0, 1 / rate)).pvalue < 0.01


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_a_ramp_has_its_requests_in_its_duration(ramp: Ramp) -> None:
    num = 200
    duration = ramp.duration_s(num)
    assert expected_until(ramp, duration, duration) == pytest.approx(num)
    counts, early = [], []
    for seed in range(200):
        times = arrival_times(2 * num, math.inf, ramp=ramp, seed=seed)  # a longer ramp, cut
        until = ramp.duration_s(2 * num) / 2
        early.append(sum(t < until for t in times))
        counts.append(sum(t < duration for t in arrival_times(num, math.inf, ramp=ramp, seed=seed)))
    half = expected_until(ramp, ramp.duration_s(2 * num) / 2, ramp.duration_s(2 * num))
    assert statistics.mean(early) == pytest.approx(half, rel=0.05)
    assert num * 0.9 < statistics.mean(counts) <= num  # never more than there are


def test_a_steady_ramp_ends_at_its_end() -> None:
    ramp = Ramp("linear", 1, 3)
    times = arrival_times(100, math.inf, ramp=ramp, burstiness=math.inf)
    assert times[-1] == pytest.approx(ramp.duration_s(100)) == pytest.approx(50)
    assert 1 / gaps(times)[0] == pytest.approx(1, rel=0.05)
    assert 1 / gaps(times)[-1] == pytest.approx(3, rel=0.05)
    with_end = arrival_times(100, math.inf, ramp=ramp, seed=4, rescaled=True)
    assert with_end[-1] == pytest.approx(50)


def test_after_a_ramp_the_rate_stays() -> None:
    ramp = Ramp("exponential", 1, 4)
    end = ramp.time_of(10, 10)
    assert ramp.time_of(14, 10) == pytest.approx(end + 1.0)
    assert ramp.time_of(0, 10) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num": -1, "rate": 1.0}, "number of requests is -1"),
        ({"num": 1, "rate": 0.0}, "request rate is 0.0"),
        ({"num": 1, "rate": math.nan}, "request rate is nan"),
        ({"num": 1, "rate": 1.0, "burstiness": 0.0}, "burstiness is 0.0"),
        ({"num": 1, "rate": 1.0, "ramp": Ramp("linear", 1, 2)}, "leave out the request rate"),
    ],
)
def test_wrong_numbers_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrival_times(**arguments)


@pytest.mark.parametrize(
    ("kind", "start", "end", "message"),
    [
        ("square", 1, 2, "linear or exponential"),
        ("linear", 1, 0, "ends at a positive rate"),
        ("linear", -1, 2, "starts at a rate from 0 on"),
        ("linear", 1, math.inf, "ends at a positive rate"),
        ("exponential", 0, 2, "cannot start at 0"),
    ],
)
def test_wrong_ramps_are_refused(kind, start: float, end: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ramp(kind, start, end)


def test_the_same_in_every_process() -> None:
    program = (
        "import json; from octavo.workload.arrivals import *; "
        "print(json.dumps([arrival_times(50, 3.0, seed=7), arrival_times(50, 3.0, burstiness=2)]))"
    )
    here = [arrival_times(50, 3.0, seed=7), arrival_times(50, 3.0, burstiness=2)]
    for hash_seed in ("0", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == here
    assert arrival_times(50, 3.0, seed=8) != here[0]
