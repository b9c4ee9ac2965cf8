from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.planner import Question, Traffic, plan
from octavo.planner.cheapest import cheapest
from octavo.planner.confirmation import confirm


def test_the_cheapest_is_found_and_confirmed():
    question = Question(
        model="llama-3.1-8b",
        hardware="h100-sxm,l40s,l4",
        traffic=Traffic(512, 64, rate=6),
        slo="ttft=1s,tpot=60",
        engine="vllm",
    )
    solution = cheapest(question)
    assert solution.is_confirmed and solution.plan.is_feasible
    assert solution.plan.verdict == solution.search.offers[0].verdict
    assert [each.limit.name for each in solution.confirmed] == ["ttft_p99", "tpot_p99"]
    document = solution.as_json()
    assert document["confirmed"] and document["offers"][0]["hardware"]


def test_the_reason_why_there_is_none():
    question = Question(
        model="llama-3.1-70b",
        hardware="a100-80-sxm",
        traffic=Traffic(500, 200, rate=1),
        slo="tpot=2",
        engine="vllm",
    )
    solution = cheapest(question)
    assert not solution.search.offers and not solution.is_confirmed
    assert solution.plan.verdict.binding.name == "tpot"
    assert solution.as_json()["refused"][0]["binding"] == "tpot"


def test_a_simulation_confirms_what_the_formula_foresees():
    found = plan(
        "llama-3.1-8b", "h100-sxm", Traffic(512, 64, rate=10), engine="vllm", slo="tpot=50,ttft=500"
    )
    for kept, confirmed in zip(found.verdict.kept, confirm(found.verdict, found.slo), strict=True):
        assert confirmed.holds == kept.holds
        assert confirmed.seconds == pytest.approx(kept.predicted.value, rel=0.35)


def test_what_does_not_fit_is_not_simulated():
    found = plan("llama-3.1-70b", "l4", engine="vllm")
    with pytest.raises(ConfigError, match="does not fit"):
        confirm(found.verdict, found.slo)
