"""NUMA nodes, the places of ranks on them, and memory policies; of machines that are made up."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError
from octavo.system import numa
from octavo.system.numa import MemoryPolicy, Node, RankPlace, auto_ranks, nodes, places, read_list

GIB = 1 << 30
PAGE = mmap.PAGESIZE
MEMINFO = """\
Node {number} MemTotal:       {total} kB
Node {number} MemFree:        {free} kB
Node {number} Inactive(file): {inactive} kB
"""


class Machine:
    """A machine under a folder, as Linux's /sys and /proc show it."""

    def __init__(self, root: Path):
        self.root = root

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def node(self, number: int, cpus: str, gib: int = 64, distance: str = "") -> Machine:
        folder = f"sys/devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", cpus + "\n")
        total = gib << 20
        meminfo = MEMINFO.format(number=number, total=total, free=total // 2, inactive=total // 4)
        self.write(f"{folder}/meminfo", meminfo)
        if distance:
            self.write(f"{folder}/distance", distance + "\n")
        return self

    def siblings(self, *cores: tuple[int, ...]) -> Machine:
        for core in cores:
            for cpu in core:
                self.write(
                    f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                    ",".join(map(str, core)),
                )
        return self

    def nodes(self, affinity: range) -> tuple[Node, ...]:
        return nodes(self.root, affinity)


@pytest.fixture
def machine(tmp_path) -> Machine:
    found = Machine(tmp_path)
    found.write("sys/devices/system/node/online", "0\n")  # no folder of a node
    return found


def even(machine: Machine, count: int, each: int = 4) -> tuple[Node, ...]:
    for number in range(count):
        machine.node(number, f"{number * each}-{number * each + each - 1}")
    return machine.nodes(range(count * each))


# -- nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("5", (5,)),
        ("", ()),
        ("\n", ()),
        ("0, 2-3", (0, 2, 3)),
        ("none", ()),
        ("3-1", ()),
    ],
)
def test_lists_of_the_kernel(text, numbers):
    assert read_list(text) == numbers


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_nodes_by_their_number(machine, count):
    found = even(machine, count)
    assert [node.number for node in found] == list(range(count))
    assert [node.cpus for node in found] == [
        tuple(range(4 * number, 4 * number + 4)) for number in range(count)
    ]
    assert all(node.total_bytes == 64 * GIB and node.free_bytes == 48 * GIB for node in found)
    assert auto_ranks(found) == count


def test_distances(machine):
    machine.node(0, "0", distance="10 21").node(1, "1", distance="21 10")
    first, second = machine.nodes(range(2))
    assert dict(first.distances) == {0: 10, 1: 21} and dict(second.distances) == {0: 21, 1: 10}
    machine.node(1, "1", distance="21")  # of another number of nodes
    assert machine.nodes(range(2))[1].distances == ()


def test_nodes_of_memory_alone_get_no_rank(machine):
    machine.node(0, "0-3").node(1, "4-7").node(2, "", gib=256)
    found = machine.nodes(range(8))
    assert found[2].cpus == () and found[2].has_memory
    assert auto_ranks(found) == 2
    assert [place.nodes for place in places(2, found, 8)] == [(0,), (1,)]


def test_nodes_without_permitted_processors_get_no_rank(machine):
    machine.node(0, "0-3").node(1, "4-7")
    found = machine.nodes(range(4, 8))
    assert found[0].cpus == () and found[1].cpus == (4, 5, 6, 7)
    assert auto_ranks(found) == 1
    assert places(2, found, 4) == (RankPlace(2), RankPlace(2))


def test_nodes_whose_memory_is_forbidden_are_not_bound_to(machine):
    machine.write("proc/self/status", "Name:\tx\nMems_allowed_list:\t0\n")
    machine.node(0, "0-3").node(1, "4-7")
    found = machine.nodes(range(8))
    assert [node.has_memory for node in found] == [True, False]
    assert [place.nodes for place in places(2, found, 8)] == [(0,), ()]


def test_nodes_without_memory_are_not_bound_to(machine):
    machine.node(0, "0-3").node(1, "4-7", gib=0)
    assert [place.nodes for place in places(2, machine.nodes(range(8)), 8)] == [(0,), ()]


def test_processors_that_are_off_are_left_out(machine):
    machine.write("sys/devices/system/cpu/online", "0-2,4-7\n")
    machine.node(0, "0-3").node(1, "4-7")
    assert machine.nodes(range(8))[0].cpus == (0, 1, 2)


def test_numbers_may_have_gaps(machine):
    machine.node(0, "0-3", distance="10 40").node(8, "4-7", distance="40 10")
    found = machine.nodes(range(8))
    assert [node.number for node in found] == [0, 8]
    assert dict(found[0].distances) == {0: 10, 8: 40}


def test_without_sysfs_there_is_one_node(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024 kB\nMemAvailable: 512 kB\n")
    (found,) = nodes(tmp_path, {3, 1})
    assert found == Node(0, (1, 3), 1 << 20, 1 << 19)
    assert auto_ranks([found]) == 1


def test_a_sysfs_of_other_processors_is_not_believed(machine):
    machine.node(0, "0-3").node(1, "4-7")
    (found,) = machine.nodes(range(100, 104))
    assert found.cpus == (100, 101, 102, 103)


def test_this_machine_has_what_this_process_may_use():
    found = nodes()
    if hasattr(os, "sched_getaffinity"):
        assert {cpu for node in found for cpu in node.cpus} == os.sched_getaffinity(0)
    assert 1 <= auto_ranks(found) <= len(found)


# -- places ---------------------------------------------------------------------------------------


def test_on_one_node_threads_are_shared_and_nothing_is_pinned(machine):
    found = even(machine, 1)
    assert places(1, found, 4) == (RankPlace(4),)
    assert places(3, found, 4) == (RankPlace(1), RankPlace(1), RankPlace(2))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_one_rank_a_node(machine, count):
    found = even(machine, count)
    for place, node in zip(places(count, found, 4 * count), found, strict=True):
        assert place == RankPlace(4, node.cpus, (node.number,))


def test_ranks_of_several_nodes_and_nodes_of_several_ranks(machine):
    found = even(machine, 4)
    two = places(2, found, 16)
    assert two == (
        RankPlace(8, tuple(range(8)), (0, 1)),
        RankPlace(8, tuple(range(8, 16)), (2, 3)),
    )
    six = places(6, found, 16)
    assert [place.nodes for place in six] == [(0,), (1,), (1,), (2,), (3,), (3,)]
    cpus = [cpu for place in six for cpu in place.cpus]
    assert cpus == list(range(16))  # each once
    assert sum(place.num_threads for place in six) == 16


def test_ranks_of_a_node_do_not_share_a_core(machine):
    """Of four cores with two threads each, 0 and 4 are one."""
    machine.node(0, "0-7").node(1, "8-11").siblings((0, 4), (1, 5), (2, 6), (3, 7))
    found = machine.nodes(range(12))
    assert found[0].cpus == (0, 4, 1, 5, 2, 6, 3, 7)
    assert [place.cpus for place in places(4, found, 12)] == [
        *((0, 4, 1, 5), (2, 6, 3, 7)),
        *((8, 9), (10, 11)),
    ]


def test_threads_are_those_that_were_asked_for(machine):
    assert [place.num_threads for place in places(2, even(machine, 2), 5)] == [2, 3]


def test_threads_are_those_of_the_control_group(machine, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(numa.machine, "cpu", lambda: SimpleNamespace(usable_cores=3))
    assert [place.num_threads for place in places(2, even(machine, 2))] == [1, 2]


@pytest.mark.parametrize(("count", "threads"), [(1, 2), (2, 2), (2, 100)])
def test_more_ranks_than_threads_or_processors(machine, count, threads):
    with pytest.raises(ConfigError, match=f"{threads} threads and {4 * count} processors: lower"):
        places(9, even(machine, count), threads)


def test_on_one_node_there_may_be_more_threads_than_processors(machine):
    assert places(9, even(machine, 1), 9) == (RankPlace(1),) * 9


def test_pinning(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda *of: asked.append(of), raising=False)
    RankPlace(2).pin()
    assert asked == []
    RankPlace(2, (4, 5)).pin()
    assert asked == [(0, (4, 5))]

    def refuse(*of: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(numa.os, "sched_setaffinity", refuse, raising=False)
    with caplog.at_level(logging.WARNING, "octavo"):
        RankPlace(2, (0, 1, 2, 8)).pin()
    (line,) = caplog.messages
    assert "processors 0-2,8" in line


# -- memory ---------------------------------------------------------------------------------------


class Kernel:
    """A system call that notes what it is asked, and may refuse it."""

    def __init__(self, refusal: int = 0):
        self.refusal = refusal
        self.asked: list[tuple] = []

    def __call__(self, number: int, *arguments: object) -> int:
        plain = (list(each) if isinstance(each, ctypes.Array) else each for each in arguments)
        self.asked.append((number, *plain))
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return 0


@pytest.fixture(autouse=True)
def on_linux(monkeypatch):
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(numa.sys, "platform", "linux")


def test_a_range_is_bound_page_by_page():
    """mbind(begin, length, MPOL_PREFERRED, mask, bits, MPOL_MF_MOVE), of whole pages."""
    kernel = Kernel()
    policy = MemoryPolicy([1], kernel)
    assert policy.bind(10 * PAGE, 3 * PAGE)
    assert policy.bind(10 * PAGE + 1, 3 * PAGE)
    assert kernel.asked == [
        (237, 10 * PAGE, 3 * PAGE, 1, [0b10], 65, 2),
        (237, 11 * PAGE, 2 * PAGE, 1, [0b10], 65, 2),
    ]


def test_less_than_a_page_is_not_asked_for():
    kernel = Kernel()
    assert not MemoryPolicy([1], kernel).bind(PAGE + 1, PAGE)
    assert kernel.asked == []


def test_memory_of_the_process():
    """set_mempolicy; of several nodes MPOL_INTERLEAVE, and nodes from 64 on have another word."""
    kernel = Kernel()
    assert MemoryPolicy([0, 70], kernel).prefer()
    assert kernel.asked == [(238, 3, [1, 1 << 6], 129)]


def test_where_any_node_will_do_nothing_is_asked():
    kernel = Kernel()
    policy = MemoryPolicy((), kernel)
    assert not policy.prefer() and not policy.bind(PAGE, PAGE)
    assert kernel.asked == []


@pytest.mark.parametrize(
    ("refusal", "words"), [(errno.EPERM, "--cap-add SYS_NICE"), (errno.EINVAL, "Invalid argument")]
)
def test_a_refusal_is_said_once(caplog, refusal, words):
    kernel = Kernel(refusal)
    policy = MemoryPolicy([1], kernel)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert not policy.bind(PAGE, PAGE)
        assert not policy.bind(PAGE, PAGE) and not policy.prefer()
    (line,) = caplog.messages
    assert "NUMA node 1" in line and "mbind" in line and words in line
    assert len(kernel.asked) == 1


@pytest.mark.parametrize(("name", "system"), [("riscv64", "linux"), ("x86_64", "darwin")])
def test_where_the_calls_are_not_known_nothing_is_asked(monkeypatch, caplog, name, system):
    monkeypatch.setattr(numa.platform, "machine", lambda: name)
    monkeypatch.setattr(numa.sys, "platform", system)
    kernel = Kernel()
    assert not MemoryPolicy([1], kernel).bind(PAGE, PAGE)
    assert kernel.asked == caplog.messages == []


def test_the_real_call_answers():
    """On this machine's own node, or with a refusal, as in many containers."""
    numbers = numa._NUMBERS.get(os.uname().machine)
    if numbers is None or os.uname().sysname != "Linux":
        pytest.skip("other system calls")
    memory = mmap.mmap(-1, 4 * PAGE)
    place = (ctypes.c_char * len(memory)).from_buffer(memory)
    policy = MemoryPolicy([nodes()[0].number])
    policy._numbers = numbers
    assert policy.bind(ctypes.addressof(place), len(memory)) in (True, False)
    memory[:4] = b"here"
    assert memory[:4] == b"here"
