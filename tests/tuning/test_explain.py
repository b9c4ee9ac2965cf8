from __future__ import annotations

import math

from octavo.planner.slo import parse_slo
from octavo.tuning.explain import TuningDecision, why
from octavo.tuning.outcome import LoadOutcome
from octavo.tuning.search import JudgedCandidate, SettingAblation
from octavo.tuning.space import DEFAULTS, SPECULATION

SLO = parse_slo("ttft_p99=500,tpot_p99=50")
BEST = DEFAULTS.having("itl_target_ms", 40.0).having("kv_cache_dtype", "int8")


def outcome(strain: float, rate: float | None = None, attainment: float = 1.0) -> LoadOutcome:
    seconds_of = {"ttft_p99": 0.1, "tpot_p99": 0.05 * strain}
    return LoadOutcome(seconds_of, strain, "tpot_p99", attainment, 2.0, 100.0, 100.0, rate)


def decision(best, predicted, defaults, *rest, simulated=None, favourite=None) -> TuningDecision:
    """``rest``: ablations, and what was measured."""
    simulated = simulated or best
    favourite = favourite or JudgedCandidate(simulated, 200, predicted)
    return TuningDecision(SLO, best, simulated, predicted, defaults, favourite, 40, *rest)


def test_what_is_chosen_what_binds_and_what_each_change_brings():
    said = why(
        decision(
            BEST,
            outcome(0.9, 4.0),
            outcome(0.95, 3.0),
            (SettingAblation("itl_target_ms", 40.0, outcome(0.97, 3.25)),),
        )
    )
    for part in (
        "itl_target_ms 40, kv_cache_dtype int8: best of 40 settings",
        "up to 4 requests/s within the limits",
        "the defaults with up to 3 requests/s",
        "What binds is tpot_p99: 45 of 50 ms.",
        "Without itl_target_ms 40, it would be up to 3.25 requests/s",
        "Answers change a little",
        "Nothing of this was measured live.",
    ):
        assert part in said


def test_the_defaults_may_be_best():
    measured = {DEFAULTS: outcome(0.8, 2.0), BEST: outcome(0.79, 2.0)}
    said = why(decision(DEFAULTS, outcome(0.7), outcome(0.7), (), measured))
    assert "The defaults: best of 40 settings" in said
    assert "Live, no other was better in every turn: 100% of 2 requests/s within the limits" in said
    assert "Answers change" not in said


def test_live_figures_stand_beside_those_of_the_defaults():
    measured = {DEFAULTS: outcome(1.3, 2.0, 0.8), BEST: outcome(1.1, 2.0, 0.9)}
    said = why(decision(BEST, outcome(0.7), outcome(0.9), (), measured))
    assert "Live, 90% of 2 requests/s within the limits" in said
    assert "the defaults, 80% of 2 requests/s" in said
    assert said.endswith("What binds is tpot_p99: 55 of 50 ms, which does not hold.")


def test_speculation_stands_beside_the_same_without_it():
    speculating = BEST.having(SPECULATION, "auto")
    measured = {
        DEFAULTS: outcome(0.9, 2.0),
        BEST: outcome(0.8, 2.0),
        speculating: outcome(0.5, 2.0),
    }
    made = decision(speculating, outcome(0.7), outcome(0.9), (), measured, simulated=BEST)
    assert made.outcome == measured[speculating]
    assert "Live, with speculation, 100% of 2 requests/s within the limits, 50%" in why(made)
    assert "without, 100% of 2 requests/s within the limits, 80%" in why(made)


def test_requests_that_failed_are_said():
    failed = LoadOutcome(
        {"ttft_p99": math.inf, "tpot_p99": math.inf}, math.inf, "ttft_p99", 0.5, 1.0, 9.0, 50.0
    )
    said = why(decision(DEFAULTS, failed, failed))
    assert "What binds is ttft_p99: requests failed." in said


def test_what_was_best_in_simulation_alone_is_said():
    measured = {DEFAULTS: outcome(0.8, 2.0), BEST: outcome(1.2, 2.0, 0.7)}
    favourite = JudgedCandidate(BEST, 200, outcome(0.5, 6.0))
    made = decision(DEFAULTS, outcome(0.7), outcome(0.7), (), measured, favourite=favourite)
    said = why(made)
    assert "itl_target_ms 40, kv_cache_dtype int8 was best in simulation, with up to 6" in said
    assert "and live, with 70% of 2 requests/s within the limits, 120%" in said
