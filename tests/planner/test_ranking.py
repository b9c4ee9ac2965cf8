"""Hardware side by side, and candidates that cannot keep up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.cost.find_device import find_device
from octavo.cost.hardware_table import devices
from octavo.planner.answer import Question, plan
from octavo.planner.cheapest import left_out, named
from octavo.planner.money import watts_text
from octavo.planner.ranking import ranked, ranked_json
from octavo.planner.report import plan_json
from octavo.planner.traffic import Traffic

MODELS = ("qwen3-32b", "llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b")
HARDWARE = ("h100-sxm", "a100-80", "l40s", "rtx4090", "h100-sxm:4", "b200")


@pytest.mark.parametrize("model", MODELS)
def test_what_cannot_keep_up_is_infeasible_and_never_an_error(model):
    for hardware in HARDWARE:
        for traffic, slo in (
            (Traffic(512, 128, rate=20), "tpot=40"),
            (Traffic(4000, 200, rate=3), "ttft=500,tpot=50"),
            (Traffic(512, 128, rate=60), "e2e=10s@p95"),
            (Traffic(100, 1, rate=500), "ttft=100"),
        ):
            found = plan(model, hardware, traffic, slo=slo)
            if found.service is None:
                assert not found.is_feasible and found.verdict.binding.why
            else:
                assert found.service.latency(99).tpot.value < 100


def test_rates_beyond_what_a_device_answers_are_overload_at_each_of_them():
    """Where steps are paced, prompts have less room beside more streams: no rate is an error."""
    rates = [0.5 * 1.3**step for step in range(24)]
    found = [
        plan("qwen3-32b", "a100-80", Traffic(512, 128, rate=rate), slo="tpot=40") for rate in rates
    ]
    assert found[0].service is not None and found[-1].service is None


def test_any_hardware_is_ranked_without_asking_for_the_cheapest():
    question = Question(model="llama-3.1-8b", hardware="any", traffic=Traffic(512, 128, rate=2))
    plans = ranked(question)
    assert len(plans) == len(named(question)) > 5
    feasible = [each.is_feasible for each in plans]
    assert feasible == sorted(feasible, reverse=True)
    costs = [each["usd_per_million_output_tokens"] for each in ranked_json(plans)]
    known = [cost for cost, is_one in zip(costs, feasible, strict=True) if is_one]
    assert known == sorted(known)


def test_counts_may_be_said_of_each():
    question = Question(model="llama-3.3-70b", hardware="h100-sxm:4,h200")
    assert {each.deployment.num_devices for each in ranked(question)} == {4, 1}


def test_devices_that_an_engine_does_not_run_on_are_left_out_of_any_and_said_of_others():
    question = Question(model="llama-3.1-8b", hardware="any")
    assert "MI300X" in left_out(question)
    assert "MI300X" not in [device.name for device, _ in named(question)]
    assert not left_out(replace(question, engine="vllm"))
    assert any("does not run on MI300X" in each for each in plan("llama-3.1-8b", "mi300x").warnings)
    assert not plan("llama-3.1-8b", "h100-sxm").warnings


def test_requests_beyond_the_memory_for_keys_and_values_wait():
    found = plan("llama-3.1-8b", "rtx4090", Traffic(4096, 512, concurrency=64))
    few = plan("llama-3.1-8b", "rtx4090", Traffic(4096, 512, concurrency=4))
    assert found.is_feasible and found.service is not None and few.service is not None
    assert any("of the 64 requests run at once" in each for each in found.warnings)
    assert not few.warnings
    assert found.service.latency(99).ttft.value > 5 * few.service.latency(99).ttft.value
    assert plan_json(found)["warnings"] == list(found.warnings)


def test_several_changes_are_advised_together_where_they_take_fewer_devices():
    found = plan("llama-3.3-70b", "rtx4090", Traffic(512, 128, rate=0.2))
    several = next(each for each in found.advice if " and use " in each.what)
    assert several.what == "quantize the weights to int4 and use 2 RTX 4090, with tp = 2"
    assert "possible" in several.gain


@pytest.mark.parametrize("hardware", ["a100-80", "rtx4090", "h100-sxm", "l40s"])
@pytest.mark.parametrize("rate", [0.5, 5])
def test_what_is_nearest_and_what_is_advised_are_the_same_number_of_devices(hardware, rate):
    found = plan("llama-3.3-70b", hardware, Traffic(512, 128, rate=rate))
    assert not found.is_feasible and found.feasible_alternatives is not None
    advised = [each.what for each in found.advice if each.what.startswith("use ")]
    number = found.feasible_alternatives.num_devices
    assert [each.split()[1] for each in advised] == ([] if number is None else [str(number)])


def test_power_says_what_it_is_of():
    assert watts_text(find_device("h100-sxm")[0]) == (
        "1,730 W with its share of the server, the network and cooling; the device alone: 700 W"
    )
    assert watts_text(find_device("l40s")[0]).endswith("W, the device alone")
    assert all(watts_text(each) or each.tdp_watts is None for each in devices(None))
