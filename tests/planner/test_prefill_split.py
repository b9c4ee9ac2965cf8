"""Replicas of a plan that compute prompts for the others, by simulation."""

from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.planner import plan
from octavo.planner.prefill_split import prefill_splits
from octavo.planner.traffic import Traffic

MODEL = "llama-3.1-8b"


def splits_of(slo: str | None, traffic: Traffic, hardware: str = "h100-sxm:4"):
    found = plan(MODEL, hardware, traffic, tp=1, slo=slo)
    return prefill_splits(found.verdict, found.slo, num_requests=120)


def test_long_prompts_beside_tight_answers_are_better_apart():
    """Each step with a part of a prompt of 4,000 tokens is one that answers wait for."""
    best, *others = splits_of("ttft=1500,tpot=9", Traffic(4000, 200, 12.0))
    assert best.num_prefill > 0 and best.worst == min(each.worst for each in others + [best])
    assert best.roles["prefill"]["replicas"] == best.num_prefill
    assert best.roles["decode"]["replicas"] == 4 - best.num_prefill
    assert sorted(each.num_prefill for each in [best, *others]) == [0, 1, 2, 3]
    whole = next(each for each in others if each.num_prefill == 0)
    assert whole.roles == {} and whole.worst > best.worst


def test_short_prompts_are_not():
    best = splits_of("ttft=200,tpot=20", Traffic(20, 200, 5.0))[0]
    assert best.num_prefill == 0


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match="one replica"):
        splits_of("tpot=50", Traffic(100, 10, 1.0), "h100-sxm")
    with pytest.raises(ConfigError, match="give slo"):
        splits_of(None, Traffic(100, 10, 1.0))
