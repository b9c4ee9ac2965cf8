"""Hardware as a user names it, and the devices that ranks have of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.communication import link_between
from octavo.cost.find_device import asked_ranks, find_device, ranks_of
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


@pytest.mark.parametrize("tp", [None, 1])
def test_one_rank_has_this_machine(tp):
    assert ranks_of(HERE, 1, tp) == (HERE, 1)


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
