"""A simulation of N devices is laid out as a plan of the same N devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.cost.engine_profile import Limits
from octavo.cost.open_spec import open_spec
from octavo.planner import Traffic, plan
from octavo.planner.fleet_layout import with_planned_layout
from octavo.sim.settings import FleetSettings
from octavo.sim.setup import TypicalLoad, prepare
from octavo.workload.settings import LoadSettings, Workload

CASES = {
    "many": ("llama-3.1-8b", "h100-sxm:8", TypicalLoad(500, 50, 40.0, None)),
    "a lone one": ("llama-3.1-8b", "h100-sxm:8", TypicalLoad(500, 50, None, 1)),
    "a large model": ("llama-3.1-70b", "h100-sxm:8", TypicalLoad(500, 50, 2.0, None)),
    "slow links": ("llama-3.1-70b", "l40s:8", TypicalLoad(500, 50, None, 32)),
    "experts": ("mixtral-8x7b", "h100-sxm:4", TypicalLoad(500, 50, 5.0, None)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_layout_is_that_of_the_plan(case):
    model, hardware, asked = CASES[case]
    fleet = FleetSettings(hardware=hardware, profile="vllm")
    found = with_planned_layout(open_spec(model), fleet, asked, Limits())
    expected = plan(model, hardware, Traffic(*asked), engine="vllm").deployment
    degrees = expected.parallel
    assert (found.tp, found.pp, found.ep, found.dp, found.replicas) == (
        *(degrees.tp, degrees.pp, degrees.ep, degrees.dp),
        expected.replicas,
    )
    assert degrees.num_devices * expected.replicas == int(hardware.rpartition(":")[2])


def test_what_is_asked_decides():
    """One alone is soonest on all devices; many are answered by replicas."""
    spec, fleet = open_spec("llama-3.1-8b"), FleetSettings(hardware="h100-sxm:8", profile="vllm")
    lone, many = (
        with_planned_layout(spec, fleet, asked, Limits())
        for asked in (TypicalLoad(500, 50, None, 1), TypicalLoad(500, 50, None, 128))
    )
    assert lone.tp > many.tp and many.replicas > lone.replicas


def test_one_device_is_left_as_it_is():
    fleet = FleetSettings(hardware="h100-sxm")
    assert (
        with_planned_layout(open_spec("llama-3.1-8b"), fleet, TypicalLoad(1, 1, None, 1), Limits())
        is fleet
    )


def test_a_simulation_asks_only_where_nothing_is_said():
    asked = []

    def lay_out(fleet, typical):
        asked.append(typical)
        return replace(fleet, tp=2, replicas=4)

    def prepared(load, **said):
        fleet = FleetSettings(hardware="h100-sxm:8", **said)
        workload = Workload(num_prompts=40, input_len=200, output_len=20)
        return prepare(open_spec("llama-3.1-8b"), fleet, workload, load, lay_out=lay_out)

    setting = prepared(LoadSettings(request_rate=10.0)).setting
    assert (setting["layout"], setting["devices"]) == ("tp 2, 4 replicas", 8)
    (typical,) = asked
    assert (typical.input_len, typical.output_len, typical.concurrency) == (200, 20, None)
    assert 5 < typical.rate < 20
    prepared(LoadSettings(max_concurrency=3))
    assert asked[1:] == [TypicalLoad(200, 20, None, 3)]
    for said in ({"tp": 4}, {"replicas": 2}, {"pp": 2}):
        prepared(LoadSettings(), **said)
    assert len(asked) == 2
