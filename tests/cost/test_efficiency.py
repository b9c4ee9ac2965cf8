"""What engines reach, by engine and device."""

from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.efficiency import PROFILES, efficiency_of
from octavo.cost.find_device import find_device
from octavo.cost.hardware_table import devices
from octavo.cost.parallel import Parallel


@pytest.mark.parametrize("profile", PROFILES)
def test_shares_are_shares_everywhere(profile):
    for device in devices():
        found = efficiency_of(profile, device)
        for share in (found.memory, found.compute, found.attention_compute, found.dequantized):
            assert 0.1 < share <= 1.0
        assert found.sharpness >= 1 and found.spread > 0 and found.link is None


def test_graphs_save_launches():
    device, _ = find_device("h100 sxm")
    graphs, eager = efficiency_of("vllm", device), efficiency_of("vllm", device, eager=True)
    assert eager.launch_s > graphs.launch_s and eager.step_s > graphs.step_s
    ours = efficiency_of("octavo", device)
    assert ours.step_s == graphs.step_s and ours.spread > graphs.spread  # it was never timed


def test_several_devices_have_a_link_between_them():
    device, _ = find_device("h100 sxm")
    assert efficiency_of("vllm", device, Parallel(tp=2)).link is not None
    assert efficiency_of("vllm", device, Parallel()).link is None
    assert efficiency_of("octavo", find_device("l4")[0], Parallel(dp=2)).link is None
    with pytest.raises(ConfigError, match="has no link"):
        efficiency_of("llama.cpp", find_device("m3 ultra")[0], Parallel(pp=2))


def test_a_processor_of_a_sheet_reaches_less_than_one_that_was_measured():
    from dataclasses import replace

    sheet, _ = find_device("epyc genoa")
    measured = efficiency_of("octavo", replace(sheet, is_measured=True))
    found = efficiency_of("octavo", sheet)
    assert found.memory < measured.memory and found.compute < measured.compute
    assert 0.7 < found.memory < 0.85 and found.spread > measured.spread


def test_engines_that_are_not_known():
    with pytest.raises(ConfigError, match="no engine profile 'vllmm': there are octavo, vllm"):
        efficiency_of("vllmm", find_device("l4")[0])


def test_processors_share_memory():
    device, _ = find_device("epyc-genoa")
    link = efficiency_of("octavo", device, Parallel(tp=2)).link
    assert link is not None and link.floor_s(2) == 1e-6
    assert efficiency_of("octavo", device, Parallel(pp=2)).link == link
    assert efficiency_of("octavo", device, Parallel(tp=2, ep=2)).link == link
    with pytest.raises(ConfigError, match="choose ep = tp"):
        efficiency_of("octavo", device, Parallel(dp=2, ep=2))
