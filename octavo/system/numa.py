"""NUMA nodes of this machine: their processors and memory, the place of each rank, and the policy
that keeps a rank's memory on its node.

A machine of several sockets, or of one that is divided, has memory that is nearer to some of its
processors. One rank of a tensor-parallel group a node reads its part of the weights from the near
one. Where there is one node, nothing is pinned and no policy is set.

`root` arguments exist so that tests can show another machine, and `Syscall` so that they can count
calls; libnuma is not needed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from octavo.base.errors import ConfigError
from octavo.system import machine

_log = logging.getLogger("octavo")
_T = TypeVar("_T")

# -- nodes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node, as far as this process may use it.

    Args:
        cpus: its processors that the process may use; those of one core follow each other. Nodes of
            memory alone (CXL, HBM) have none, nor have those outside of the affinity.
        total_bytes, free_bytes: of its memory, that of others included.
        has_memory: it has memory, and the process may have some of it (cpuset).
        distances: to each node by its number, 10 to itself; empty where the kernel does not tell.
    """

    number: int
    cpus: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    has_memory: bool = True
    distances: tuple[tuple[int, int], ...] = ()

    @property
    def cpus_text(self) -> str:
        """``processors 0-3,8 (5)``, for people."""
        if not self.cpus:
            return "no processors"
        return f"processors {_ranges(self.cpus)} ({len(self.cpus)})"


def nodes(root: Path = Path("/"), affinity: Collection[int] | None = None) -> tuple[Node, ...]:
    """Return the nodes of this machine by number; one that has all, where the kernel tells nothing.

    Args:
        affinity: processors that this process may use; None asks the system.
    """
    allowed = _affinity() if affinity is None else set(affinity)
    folder = root / "sys/devices/system/node"
    numbers = sorted(
        int(match[1]) for path in _entries(folder) if (match := re.fullmatch(r"node(\d+)", path))
    )
    cpus = {number: _cpus(folder / f"node{number}", root, allowed) for number in numbers}
    if not any(cpus.values()):  # no sysfs, as in some sandboxes, or one that does not fit
        memory = machine.memory(root)
        return (Node(0, tuple(sorted(allowed)), memory.total, memory.available),)
    permitted = _permitted_memory(root)
    found = []
    for number in numbers:
        total, free = _memory(folder / f"node{number}")
        has_memory = total > 0 and (permitted is None or number in permitted)
        distances = _distances(folder / f"node{number}", numbers)
        found.append(Node(number, cpus[number], total, free, has_memory, distances))
    return tuple(found)


def auto_ranks(nodes: Sequence[Node]) -> int:
    """Return the number of ranks for ``--tensor-parallel-size auto``: one for each node that has
    processors."""
    return max(1, sum(1 for node in nodes if node.cpus))


def read_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list as the kernel writes it: ``0-3,8`` is 0, 1, 2, 3, 8. What is
    none of it, is left out."""
    found: list[int] = []
    for first, last in re.findall(r"(?:^|,)\s*(\d+)(?:-(\d+))?(?=\s*(?:,|$))", text.strip()):
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _entries(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cpus(folder: Path, root: Path, allowed: set[int]) -> tuple[int, ...]:
    """The processors of a node that are on and allowed, those of one core side by side."""
    system = root / "sys/devices/system/cpu"
    online = set(read_list(_read(system / "online"))) or allowed
    cpus = set(read_list(_read(folder / "cpulist"))) & allowed & online

    def core(cpu: int) -> tuple[int, int]:
        siblings = read_list(_read(system / f"cpu{cpu}" / "topology/thread_siblings_list"))
        return min(siblings, default=cpu), cpu

    return tuple(sorted(cpus, key=core))


def _memory(folder: Path) -> tuple[int, int]:
    """Bytes of a node's memory, and what of them is free or holds files that may be dropped."""
    found = dict(re.findall(r"(\w+(?:\(\w+\))?):\s+(\d+) kB", _read(folder / "meminfo")))
    names = "MemFree", "Inactive(file)"
    free = sum(int(found.get(name, 0)) for name in names)
    return 1024 * int(found.get("MemTotal", 0)), 1024 * free


def _permitted_memory(root: Path) -> set[int] | None:
    """Nodes whose memory the process may have, by its cpuset; None where that is not told."""
    match = re.search(r"^Mems_allowed_list:\s*(\S+)", _read(root / "proc/self/status"), re.M)
    return None if match is None else set(read_list(match[1]))


def _distances(folder: Path, numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    said = [int(each) for each in _read(folder / "distance").split() if each.isdecimal()]
    return tuple(zip(numbers, said, strict=True)) if len(said) == len(numbers) else ()


# -- places of ranks ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank on the machine.

    Args:
        num_threads: that it computes with.
        cpus: that it is pinned to; empty: it is not pinned.
        nodes: numbers of the nodes that its memory is to be on; empty: any.
    """

    num_threads: int
    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()

    def pin(self) -> None:
        """Pin this process, and the threads that it starts from now on. Where the system refuses,
        one line says so, and threads run anywhere."""
        if not self.cpus:
            return
        try:
            os.sched_setaffinity(0, self.cpus)
        except OSError as error:
            _log.warning(
                "a rank is not pinned to processors %s: %s", _ranges(self.cpus), error.strerror
            )


def places(
    num_ranks: int, nodes: Sequence[Node], num_threads: int | None = None
) -> tuple[RankPlace, ...]:
    """Return the place of each rank.

    Ranks are dealt out over the nodes that have processors, in order: one or more nodes a rank, or
    ranks that share a node and its cores. With one such node nothing is pinned.

    Args:
        num_threads: of all ranks together; None is all that may be used, within the control group.

    Raises:
        ConfigError: there is no thread, or no processor, for each rank.
    """
    with_cpus = [node for node in nodes if node.cpus]
    num_cpus = sum(len(node.cpus) for node in with_cpus)
    total = machine.cpu().usable_cores if num_threads is None else num_threads
    if num_ranks > total or (len(with_cpus) > 1 and num_ranks > num_cpus):
        raise ConfigError(
            f"{num_ranks} ranks need a thread and a processor each, and there are {total} threads "
            f"and {num_cpus} processors: lower tensor_parallel_size"
        )
    threads = [len(part) for part in _dealt(range(total), num_ranks)]
    if len(with_cpus) < 2:
        return tuple(RankPlace(count) for count in threads)
    if num_ranks <= len(with_cpus):
        groups = _dealt(with_cpus, num_ranks)
        cpus = [tuple(cpu for node in group for cpu in node.cpus) for group in groups]
    else:
        groups, cpus = [], []
        for node, ranks in zip(with_cpus, _dealt(range(num_ranks), len(with_cpus)), strict=True):
            groups += [[node]] * len(ranks)
            cpus += [tuple(part) for part in _dealt(node.cpus, len(ranks))]
    return tuple(
        RankPlace(count, own, tuple(node.number for node in group if node.has_memory))
        for count, own, group in zip(threads, cpus, groups, strict=True)
    )


def _dealt(things: Sequence[_T], count: int) -> list[Sequence[_T]]:
    """Things in ``count`` runs that are as long as each other, or shorter by one."""
    ends = [len(things) * index // count for index in range(count + 1)]
    return [things[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,8`` of 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# -- memory policy --------------------------------------------------------------------------------

Syscall = Callable[..., int]  # (number, *arguments); OSError where the kernel refuses

# Of Linux's interface: (mbind, set_mempolicy) by architecture, and the policies.
_NUMBERS = {"x86_64": (237, 238), "aarch64": (235, 237)}
_PREFERRED, _INTERLEAVE = 1, 3
_MOVE = 1 << 1  # pages that are elsewhere already, and that no other process maps
_MASK_BITS = 64
_PAGE = mmap.PAGESIZE


class MemoryPolicy:
    """Puts the memory of this process on the nodes of its rank.

    A node is preferred, not required: memory that it has not comes from another one, where a strict
    policy would have the process killed. Of several nodes, pages are dealt out. Pages of mapped
    files lie where the process was that read them first; only what is copied is moved.

    Containers often forbid these calls: then one line is logged, and nothing is asked again.
    """

    def __init__(self, nodes: Sequence[int], syscall: Syscall | None = None):
        self._nodes = tuple(nodes)
        self._numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        self._syscall = syscall or _libc_syscall
        self._is_refused = self._numbers is None

    def prefer(self) -> bool:
        """Have this process allocate on its nodes from now on. Return whether that was done."""
        return self._ask(1, *self._policy())

    def bind(self, address: int, num_bytes: int) -> bool:
        """Have the whole pages of an address range lie on the nodes, and move those that are
        elsewhere. Return whether that was done."""
        begin, end = -(-address // _PAGE) * _PAGE, (address + num_bytes) // _PAGE * _PAGE
        if end <= begin:
            return False
        return self._ask(0, begin, end - begin, *self._policy(), _MOVE)

    def _policy(self) -> tuple[int, ctypes.Array[ctypes.c_uint64], int]:
        """Mode, node mask, and its number of bits (of which the kernel looks at one less)."""
        words = max(self._nodes, default=0) // _MASK_BITS + 1
        mask = (ctypes.c_uint64 * words)()
        for node in self._nodes:
            mask[node // _MASK_BITS] |= 1 << node % _MASK_BITS
        mode = _PREFERRED if len(self._nodes) == 1 else _INTERLEAVE
        return mode, mask, words * _MASK_BITS + 1

    def _ask(self, which: int, *arguments: object) -> bool:
        if not self._nodes or self._is_refused:
            return False
        assert self._numbers is not None
        try:
            self._syscall(self._numbers[which], *arguments)
        except OSError as error:
            self._is_refused = True
            is_forbidden = error.errno in (errno.EPERM, errno.ENOSYS)
            _log.warning(
                "memory is not kept on NUMA node %s: the system refuses %s: %s%s",
                _ranges(self._nodes),
                ("mbind", "set_mempolicy")[which],
                error.strerror,
                "; in a container, allow it (Docker: --cap-add SYS_NICE)" if is_forbidden else "",
            )
            return False
        return True


def _libc_syscall(number: int, *arguments: object) -> int:
    """Make a system call. OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    passed = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
