"""Tensor-parallel groups, and pipelines of them, whose ranks are threads of one process.

As ranks in processes of their own they share the group's memory alone: each has its own program, KV
and threads, and learns of steps by messages.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace

from octavo.base.errors import PeerEndedError
from octavo.kernels.cpu.group import ShmGroup
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.following_forward import Follower, follow
from octavo.runtime.rank import Rank
from octavo.runtime.rank_memory import DESCRIPTORS, Membership, RankMemory

_NUM_BYTES = 8 << 30  # of address space


def start_ranks(
    size: int, spec: RankSpec, model, config, limits: RankLimits, stages: int = 1
) -> Rank:
    """Return rank 0 of a started group, or pipeline, whose other ranks follow until it is
    collected."""
    memory = RankMemory(size, stages, num_bytes=_NUM_BYTES, is_crowded=True)
    failures: list[BaseException] = []
    threads = []
    for number in range(1, size * stages):
        membership = membership_of(memory, number)
        follower = Rank.of_model(_joined(spec, membership), model, config)
        follower.start(limits)
        work = _work(membership, memory, follower, failures)
        threads.append(threading.Thread(target=work, name=f"rank {number}", daemon=True))
    lead = Rank.of_model(_joined(spec, memory.home), model, config)
    lead.start(limits)
    for thread in threads:
        thread.start()
    lead.failures_of_followers = failures
    weakref.finalize(lead, _end, memory, threads)
    return lead


def membership_of(memory: RankMemory, number: int) -> Membership:
    """Return the membership of a rank in a process that has the memory already."""
    ticket = memory.ticket(number)
    copies = {name: os.dup(fd) for name in DESCRIPTORS if (fd := ticket[name]) is not None}
    return Membership.attach(ticket | copies)


def _joined(spec: RankSpec, membership: Membership) -> RankSpec:
    return replace(spec, group=membership.group, pipeline=membership.pipeline)


def _work(membership: Membership, memory: RankMemory, rank: Rank, failures: list[BaseException]):
    def work() -> None:
        try:
            follow(membership.messages, Follower(rank.forward))
        except PeerEndedError:
            pass
        except BaseException as error:  # the others must not wait for it
            failures.append(error)
            memory.abort()

    return work


def _end(memory: RankMemory, threads: list[threading.Thread]) -> None:
    memory.abort()
    for thread in threads:
        thread.join(10)


def lone_follower(like: Rank, model, config) -> Follower:
    """Return a follower of a group that has ended: what it is told to compute ends at the first
    meeting."""
    home = ShmGroup.create(2, num_bytes=_NUM_BYTES)
    group = ShmGroup.attach(os.dup(home.fd), 1, 2)
    rank = Rank.of_model(replace(like.spec, group=group), model, config)
    rank.start(like.forward.limits)
    home.abort()
    return Follower(rank.forward)
