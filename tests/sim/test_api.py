"""What a script imports."""

from __future__ import annotations

import pytest

import octavo.sim
from octavo.base.errors import ConfigError
from octavo.sim import FleetSettings, LoadSettings, Workload, prepare

WORKLOAD = Workload(num_prompts=10, input_len=100, output_len=10)


def test_all_names_are_there():
    assert all(hasattr(octavo.sim, name) for name in octavo.sim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Fleet'"):
        octavo.sim.Fleet  # noqa: B018


def test_a_run_by_names_alone():
    fleet = FleetSettings(hardware="h100-sxm")
    report = prepare("llama-3.1-8b", fleet, WORKLOAD, LoadSettings(request_rate=8.0)).run()
    assert report.as_json()["completed"] == 10 and report.as_json()["p99_ttft_ms"] > 0
    with pytest.raises(ConfigError, match="llama"):
        prepare("lama-3.1-8b", fleet, WORKLOAD, LoadSettings())
