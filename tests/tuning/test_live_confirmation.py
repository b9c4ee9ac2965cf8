"""Candidates on a real engine, a tiny one."""

from __future__ import annotations

import pytest

from octavo.bench.offline.session import OfflineSession
from octavo.planner.slo import parse_slo
from octavo.settings.engine import EngineArgs
from octavo.tuning.live_confirmation import LiveMeasurement, LiveRuns, measure, within
from octavo.tuning.outcome import LoadOutcome
from octavo.tuning.space import DEFAULTS
from octavo.workload.datasets import random_requests

ONE = DEFAULTS.having("max_num_seqs", 1)


def outcome(strain: float, score: float = 100.0) -> LoadOutcome:
    return LoadOutcome({}, strain, "ttft_p99", 1.0, 1.0, 1.0, score)


def measured(*strains: float) -> LiveMeasurement:
    return LiveMeasurement(outcome(max(strains)), tuple(map(outcome, strains)))


def test_each_run_has_an_engine_of_its_own_and_the_same_requests(tiny_model):
    opened = []

    def open_session(candidate):
        args = EngineArgs.from_kwargs(str(tiny_model), max_model_len=128, **candidate.settings)
        opened.append(OfflineSession(args))
        return opened[-1]

    requests = random_requests(6, 200, 16, 4)
    times = [0.02 * number for number in range(1, 7)]
    heard = []
    found = measure(
        [DEFAULTS, ONE],
        open_session,
        requests,
        times,
        parse_slo("ttft=10s,tpot=10s"),
        turns=2,
        progress=lambda *said: heard.append(said),
    )
    limits = [each.loaded.config.scheduler.max_num_seqs for each in opened]
    assert limits == [64, 1, 1, 64]  # forth and back
    for each in found.values():
        assert each.total.holds and each.total.attainment == 1.0 and len(each.turns) == 2
        assert each.total.rate == pytest.approx(50)
        assert each.total.seconds_of["ttft_p99"] >= min(
            turn.seconds_of["ttft_p99"] for turn in each.turns
        )
    assert heard[0] == ("live: the defaults", 0, 4) and heard[-1][1] == 3


def test_whoever_is_chosen_did_better_in_every_turn():
    usual = measured(0.8, 0.9)
    assert measured(0.5, 0.6).beats(usual)
    assert not measured(0.85, 0.5).beats(usual)  # once it was worse
    assert not measured(0.79, 0.88).beats(usual)  # which cannot be noticed


def test_the_defaults_stay_unless_others_beat_them():
    def best(*others: LiveMeasurement):
        runs = {DEFAULTS: measured(0.8, 0.8)}
        runs |= {DEFAULTS.having("max_num_seqs", n): each for n, each in enumerate(others, 1)}
        return LiveRuns(runs, {each: outcome(0.5) for each in runs}, [1.0]).best

    assert best(measured(0.79, 0.79), measured(0.9, 0.9)) == DEFAULTS
    assert best(measured(0.5, 0.5), measured(0.49, 0.49)) == ONE
    assert best(measured(0.7, 0.7), measured(0.5, 0.5)).settings == {"max_num_seqs": 2}


def test_requests_within_some_seconds():
    assert within([0.1, 0.9, 1.0, 1.1], 1.0) == [0.1, 0.9, 1.0]
