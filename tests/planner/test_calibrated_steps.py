"""Steps that were timed stand for the model as it was timed, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from calibrations import STEPS

from octavo.cost.find_device import find_device
from octavo.cost.measured_steps import calibrated
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.rank import rank_model
from octavo.cost.work import Span
from octavo.planner import Question, Traffic, plan
from octavo.planner.cheapest import cheapest
from octavo.planner.deployment import CalibratedSteps

MODEL, HARDWARE, SHORT = "qwen3-0.6b", "epyc-genoa", Traffic(100, 50, concurrency=2)


@pytest.fixture
def measured():
    device, _ = find_device(HARDWARE)
    return CalibratedSteps.of(STEPS, open_spec(MODEL), device.name)


@pytest.fixture
def deployment(measured):
    return plan(MODEL, HARDWARE, SHORT, measured=measured).deployment


def test_a_plan_is_of_the_steps_that_were_timed(deployment, measured):
    found = plan(MODEL, HARDWARE, SHORT, measured=measured)
    rank = rank_model(deployment.spec, deployment.precision)
    steps = calibrated(rank, deployment.device, STEPS)
    assert found.decode_step == steps.cost([Span(124, 1)] * 2).total
    assert found.decode_step.source == "measured"
    assert found.service.latency().e2e.source == "measured"


def test_beyond_what_was_timed_a_plan_says_so(measured):
    found = plan(MODEL, HARDWARE, Traffic(8000, 50), measured=measured)
    assert found.decode_step.source == "extrapolated"


@pytest.mark.parametrize(
    "choices",
    [
        {"quantization": "int4"},
        {"kv_cache_dtype": "int8"},
        {"dtype": "float32"},
        {"engine": "llama.cpp"},
    ],
)
def test_other_bits_and_engines_were_not_timed(measured, choices):
    with_them = plan(MODEL, HARDWARE, SHORT, measured=measured, **choices)
    without = plan(MODEL, HARDWARE, SHORT, **choices)
    assert with_them.decode_step == without.decode_step
    assert with_them.decode_step.source == "roofline"


def test_neither_were_other_devices_and_layouts(deployment):
    card = find_device("h100-sxm")[0]
    for changed in (replace(deployment, device=card), replace(deployment, parallel=Parallel(dp=2))):
        assert changed.step_time([Span(100, 1)]).source == "roofline"


def test_what_steps_do_not_depend_on_changes_nothing(deployment):
    for same in (deployment.limited(max_num_seqs=3), deployment.times(2)):
        assert same.step_time([Span(100, 1)]) == deployment.step_time([Span(100, 1)])


def test_a_cache_of_another_type_can_have_been_timed():
    spec, (device, _) = open_spec(MODEL), find_device(HARDWARE)
    measured = CalibratedSteps.of(STEPS, spec, device.name, "int8")
    sources = {
        kv: plan(MODEL, HARDWARE, SHORT, measured=measured, kv_cache_dtype=kv).decode_step.source
        for kv in (None, "int8", "fp8")
    }
    assert sources == {None: "roofline", "int8": "measured", "fp8": "roofline"}


def test_a_change_that_was_not_timed_is_compared_by_what_is_foreseen_of_both(measured):
    """Steps that are slower than foreseen make nothing else an advice."""
    slow = {name: 1e3 * seconds for name, seconds in STEPS.seconds_of.items()}
    slower = replace(measured, steps=replace(STEPS, seconds_of=slow))
    with_them = plan(MODEL, HARDWARE, SHORT, measured=slower).advice
    without = plan(MODEL, HARDWARE, SHORT).advice
    gains = [
        {each.what: each.gain for each in found if "the KV cache in" in each.what}
        for found in (with_them, without)
    ]
    assert gains[0] == gains[1]


def test_the_cheapest_takes_them_for_their_own_device_only(measured):
    question = Question(model=MODEL, hardware=f"{HARDWARE},l4", traffic=SHORT, measured=measured)
    found = cheapest(question, most_devices=1).search
    sources = {
        (each.deployment.device.name, each.deployment.precision.name): each.deployment.step_time(
            [Span(100, 1)]
        ).source
        for each in (*found.offers, *found.refused)
    }
    timed = {key for key, source in sources.items() if source == "measured"}
    assert timed == {(measured.device, measured.precision.name)}
