"""Candidates on simulated engines, from a load to a decision."""

from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.measured_steps import MeasuredSteps, Spread
from octavo.cost.open_spec import open_spec
from octavo.planner.slo import parse_slo
from octavo.sim.prompts import PromptSpec
from octavo.tuning.live_confirmation import LiveMeasurement
from octavo.tuning.objective import GivenLoad, HighestRate
from octavo.tuning.outcome import LoadOutcome
from octavo.tuning.simulated_engines import SimulatedEngines
from octavo.tuning.space import DEFAULTS, SPECULATION, CandidateSettings
from octavo.tuning.study import TuningStudy

MODEL, SLO = "llama-3.1-8b", parse_slo("ttft_p99=800,tpot_p99=30")
FP8 = DEFAULTS.having("kv_cache_dtype", "fp8")
ASKS = [PromptSpec(str(n), (range(800 * n, 800 * (n + 1)),), 32) for n in range(60)]
TIMES = [n / 10 for n in range(60)]


def engines(held=None, acceptance=None, steps=None) -> SimulatedEngines:
    specs = {MODEL: open_spec(MODEL), "qwen3-32b": open_spec("qwen3-32b")}
    steps = steps or {DEFAULTS: None, FP8: None, DEFAULTS.having("model", "qwen3-32b"): None}
    return SimulatedEngines(specs, MODEL, "h100-sxm", held or {}, steps, acceptance)


def study(**settings) -> TuningStudy:
    return TuningStudy(engines(**settings), ASKS, GivenLoad(SLO, TIMES), SLO)


def test_settings_come_to_the_simulated_engine():
    config = engines().fleet(DEFAULTS.having("max_num_seqs", 7)).replica.config
    assert config.scheduler.max_num_seqs == 7 and config.cache.dtype == "bfloat16"
    assert config.scheduler.target_step_seconds == 0.08  # as in a server
    held = engines(held={"max_num_seqs": 9, "itl_target_ms": 0.0})
    config = held.fleet(FP8).replica.config
    assert config.scheduler.max_num_seqs == 9 and config.scheduler.target_step_seconds == 0.0
    assert "fp8" in config.cache.dtype
    other = engines().fleet(DEFAULTS.having("model", "qwen3-32b")).replica.config
    assert other.cache.num_blocks < config.cache.num_blocks


def test_steps_are_those_of_the_part_of_a_candidate_that_they_depend_on():
    slow, quick = (
        MeasuredSteps({"pass": seconds}, {"decode": Spread(1.0, 1.0)}, 512, 64, 9999)
        for seconds in (0.02, 0.01)
    )
    made = TuningStudy(
        engines(steps={DEFAULTS: slow, FP8: quick}), ASKS, GivenLoad(SLO, TIMES), SLO
    )
    usual = made.judge(DEFAULTS, 20).seconds_of["tpot_p99"]
    assert made.judge(FP8, 20).seconds_of["tpot_p99"] == pytest.approx(usual / 2, rel=0.05)
    both = made.judge(FP8.having("max_num_seqs", 100), 20)
    assert both.seconds_of["tpot_p99"] < 0.7 * usual


def test_drafts_are_accepted_at_the_given_rates_or_not_made():
    speculating = DEFAULTS.having(SPECULATION, "auto")
    plain = study().judge(DEFAULTS, 30)
    assert study().judge(speculating, 30) == plain
    sure = study(acceptance=(0.9, 0.9)).judge(speculating, 30)
    assert sure.seconds_of["tpot_p99"] < 0.7 * plain.seconds_of["tpot_p99"]


def test_settings_that_contradict_each_other_are_the_worst_and_no_error():
    impossible = CandidateSettings(
        (("enable_chunked_prefill", False), ("max_num_batched_tokens", 64))
    )
    made = study().judge(impossible, 20)
    assert not made.holds and made.goodput == 0
    with pytest.raises(ConfigError, match="without chunked prefill"):
        study(held=impossible.settings).judge(DEFAULTS, 20)


def test_what_is_predicted_of_a_plan_is_what_was_judged_of_the_same():
    made = study()
    assert made.predicted(FP8, TIMES[:20]) == made.judge(FP8, 20)


def test_a_decision_has_what_speaks_for_it():
    made = study()
    one_at_a_time = DEFAULTS.having("max_num_seqs", 1)
    found = made.search([DEFAULTS, FP8, one_at_a_time], lambda what, done, total: None)
    decision = made.decide(found)
    assert decision.best in (DEFAULTS, FP8) and decision.outcome == decision.predicted
    assert decision.num_tried == 3
    assert [each.name for each in decision.ablations] == list(decision.best.settings)
    assert not made.judge(one_at_a_time, 60).holds
    assert made.judge(one_at_a_time, 60).binding == "ttft_p99"


@pytest.fixture
def engines_that(monkeypatch):
    """Live engines with an outcome of their own; what they were sent is in the list."""

    def make(*outcomes: LoadOutcome) -> list[int]:
        sent, left = [], list(outcomes)

        def measure(candidates, open_session, requests, times, slo, *, turns, progress):
            assert len(requests) == len(times)
            sent.append(len(times))
            made = left.pop(0)
            return {each: LiveMeasurement(made, (made,) * turns) for each in candidates}

        monkeypatch.setattr("octavo.tuning.study.measure", measure)
        return sent

    return make


def outcome(strain: float) -> LoadOutcome:
    return LoadOutcome({"ttft_p99": strain}, strain, "ttft_p99", 1.0, 1.0, 1.0, 100.0, rate=10.0)


def run_live(made: TuningStudy, seconds: float):
    return made.run_live(
        outcome(0.5), [DEFAULTS, FP8], None, ASKS, seconds=seconds, turns=2, progress=None
    )


def test_live_runs_go_on_at_a_lower_rate_where_no_engine_keeps_the_limits(engines_that):
    highest = HighestRate(SLO, TIMES)
    made = TuningStudy(engines(), ASKS, highest, SLO)
    sent = engines_that(outcome(1.5), outcome(0.9))
    runs = run_live(made, 0.5)
    plans = list(highest.trials(outcome(0.5)))
    assert sent == [sum(time <= 0.5 for time in plan) for plan in plans[:2]]
    assert sent[0] > sent[1] == len(runs.times)
    assert runs.any_holds and set(runs.predicted) == {DEFAULTS, FP8}
    assert made.decide(made.search([DEFAULTS], lambda *said: None), runs).outcome.holds


def test_a_given_load_is_run_once_whether_it_holds_or_not(engines_that):
    sent = engines_that(outcome(1.5))
    runs = run_live(study(), 2.0)
    assert sent == [21] and not runs.any_holds


def test_too_few_requests_are_not_run(engines_that):
    sent = engines_that()
    assert run_live(study(), 0.3) is None and not sent
