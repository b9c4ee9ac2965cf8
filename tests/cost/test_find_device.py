"""Hardware as a user names it, and the devices that ranks have of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.calibration.link_run import keep
from octavo.cost.communication import all_reduce, link_between, link_of, point_to_point
from octavo.cost.find_device import asked_ranks, find_device, ranks_of
from octavo.cost.networks import Network
from octavo.cost.parallel import Parallel
from octavo.system import numa

SOCKET, _ = find_device("epyc-genoa")
# This machine, as it would have been measured.
HERE = replace(SOCKET, name="It, 96 threads", is_measured=True)


def test_sockets_are_devices():
    assert SOCKET.num_cores == 96
    assert SOCKET.link_kind == "shared memory"
    assert SOCKET.link_bandwidth == SOCKET.memory_bandwidth / 4  # and 96 x 20 GB/s were more
    assert ranks_of(SOCKET, 2, 2) == (SOCKET, 2)


def test_one_rank_has_this_machine():
    assert ranks_of(HERE, 1, 1) == (HERE, 1)


def test_ranks_share_this_machine():
    part, count = ranks_of(HERE, 1, 4)
    assert (part.name, count) == ("1/4 of It, 96 threads", 4)
    assert part.memory_bandwidth == HERE.memory_bandwidth / 4
    assert part.memory_bytes == HERE.memory_bytes / 4
    assert part.peak("int8") == HERE.peak("int8") / 4
    assert part.num_cores == 24
    assert HERE.link_bandwidth is not None
    assert link_between(part, Parallel(tp=4)).bandwidth == HERE.link_bandwidth / 4


def test_there_is_a_core_for_each_rank():
    with pytest.raises(ConfigError, match="97 ranks need a core each.*the nearest is 96"):
        ranks_of(HERE, 1, 97)


def test_this_machine_is_no_more_than_it_is():
    """Without parts nothing would be gained by a second rank; and of four parts there are four."""
    with pytest.raises(ConfigError, match="but 1 do"):
        link_between(HERE, Parallel(tp=2))
    with pytest.raises(ConfigError, match="but 4 do"):
        link_between(HERE.shared_by(4), Parallel(tp=8))


def test_auto_is_a_rank_for_each_socket_or_node(monkeypatch):
    nodes = tuple(numa.Node(number, (number,), 1, 1) for number in range(4))
    monkeypatch.setattr(numa, "nodes", lambda: nodes)
    assert asked_ranks("auto", HERE, 1) == 4
    assert asked_ranks("auto", SOCKET, 2) == 2
    assert asked_ranks("auto", find_device("h100-sxm")[0], 2) is None  # the best is taken
    assert asked_ranks(3, HERE, 1) == 3 and asked_ranks(None, HERE, 1) is None


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    network = Network(
        name="node-2", latency_s=50e-6, latency_p99_s=90e-6, bandwidth=1e9, measured_at="2026-11-28"
    )
    keep(network)
    return network


def test_machines_have_the_network_that_was_measured(measured):
    device, count = find_device("epyc-genoa:2@node-2")
    assert (device, count) == (replace(SOCKET, network=measured), 2)
    assert device.as_json()["network"]["latency_s"] == 50e-6
    assert ranks_of(device, 2, 1) == (device, 2)  # machines are not divided
    link = link_between(device, Parallel(pp=2))
    assert point_to_point(4e6, link, 2) == pytest.approx(50e-6 + 4e-3)
    with pytest.raises(ConfigError, match="takes longer over a network than the layer: choose pp"):
        link_between(device, Parallel(tp=2))


def test_gpus_of_several_machines_have_it_too(measured):
    usual, _ = find_device("h100-sxm:16")
    device, count = find_device("h100-sxm:16@node-2")
    assert count == 16
    for num_ranks, is_measured in ((8, False), (16, True)):
        seconds = point_to_point(4e6, link_of(device), num_ranks)
        assert (seconds == pytest.approx(measured.seconds(4e6))) == is_measured
        assert (seconds == point_to_point(4e6, link_of(usual), num_ranks)) != is_measured
    assert all_reduce(4e6, 8, link_of(device)) == all_reduce(4e6, 8, link_of(usual))
    assert all_reduce(4e6, 16, link_of(device)) > all_reduce(4e6, 16, link_of(usual))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("epyc-genoa@node-2", "say how many, as in epyc-genoa:2@node-2"),
        ("epyc-genoa:2@node-3", "no link to 'node-3' was measured, but to node-2"),
        ("epyc-genoa:2@", "no link to '' was measured"),
    ],
)
def test_networks_that_are_not_there_are_refused(measured, text, why):
    with pytest.raises(ConfigError, match=why):
        find_device(text)
