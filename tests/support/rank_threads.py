"""Tensor-parallel groups, and pipelines of them, whose ranks are threads of one process.

As ranks in processes of their own they share the group's memory alone: each has its own program, KV
and threads, and learns of steps by messages.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from octavo.base.errors import EngineError, PeerEndedError
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.following_forward import Follower, follow
from octavo.runtime.rank import Rank
from octavo.runtime.rank_memory import SHARED, Membership, RankMemory, descriptors
from octavo.runtime.step_words import BadMessage
from octavo.serving.follower import follower_of

_NUM_BYTES = 8 << 30  # of address space


def start_ranks(
    size: int, spec: RankSpec, model, config, limits: RankLimits, stages: int = 1
) -> Rank:
    """Return rank 0 of a started group, or pipeline, whose other ranks follow until it is
    collected."""
    memory = RankMemory(size, stages, num_bytes=_NUM_BYTES, is_crowded=True)
    failures: list[BaseException] = []
    threads = []
    folder = tempfile.TemporaryDirectory(prefix="octavo-test-")
    spec = replace(spec, meeting_point=Path(folder.name) / "ranks")
    for number in range(1, size * stages):
        membership = membership_of(memory, number)
        make = partial(_started, _joined(spec, membership), model, config, limits)
        work = _work(membership, memory, make, failures)
        threads.append(threading.Thread(target=work, name=f"rank {number}", daemon=True))
        threads[-1].start()  # ranks of fused kernels wait for each other while they load
    lead = _started(_joined(spec, memory.home), model, config, limits)
    lead.failures_of_followers = failures
    weakref.finalize(lead, _end, memory, threads, folder)
    return lead


def _started(spec: RankSpec, model, config, limits: RankLimits) -> Rank:
    rank = Rank.of_model(spec, model, config)
    rank.start(limits)
    return rank


def membership_of(memory: RankMemory, number: int) -> Membership:
    """Return the membership of a rank in a process that has the memory already."""
    ticket = memory.ticket(number)
    copies = {fd: os.dup(fd) for fd in descriptors(ticket)}
    entries = {name: ticket[name] for name in SHARED if ticket[name] is not None}
    mine = {name: [copies[fd], place, size] for name, (fd, place, size) in entries.items()}
    return Membership.attach(ticket | mine | {"host": copies[ticket["host"]]})


def _joined(spec: RankSpec, membership: Membership) -> RankSpec:
    return replace(spec, group=membership.group, pipeline=membership.pipeline)


def _work(
    membership: Membership,
    memory: RankMemory,
    make: Callable[[], Rank],
    failures: list[BaseException],
):
    def work() -> None:
        try:
            follow(membership.messages, follower_of(make().forward))
        except PeerEndedError:
            pass
        except BaseException as error:  # the others must not wait for it
            failures.append(error)
            memory.abort()

    return work


def _end(
    memory: RankMemory, threads: list[threading.Thread], folder: tempfile.TemporaryDirectory
) -> None:
    memory.abort()
    for thread in threads:
        thread.join(10)
    folder.cleanup()


def num_refused(follower: Follower, sent, seed: int) -> int:
    """Tell a follower 150 of the messages of a group, cut and with other numbers in them; return
    how many it refused."""
    chosen, refused = random.Random(seed), 0
    for _ in range(150):
        message = chosen.choice(sent).copy()
        for _ in range(chosen.randrange(1, 4)):
            place = chosen.randrange(min(len(message), 40))
            message[place] = chosen.choice(
                [0, 1, -1, 2**31 - 1, -(2**31), chosen.randrange(300), int(message[place]) ^ 1]
            )
        if chosen.random() < 0.3:
            message = message[: chosen.randrange(1, len(message) + 1)]
        try:
            follower.obey(message)
        except (BadMessage, EngineError):
            refused += 1
    return refused


def lone_follower(like: Rank, model, config) -> Follower:
    """Return the last follower of a group, or pipeline, that has ended: what it is told to compute
    ends at the first exchange."""
    spec = like.spec
    memory = RankMemory(spec.part.size, spec.stage.count, num_bytes=_NUM_BYTES)
    membership = membership_of(memory, memory.num_ranks - 1)
    rank = Rank.of_model(_joined(spec, membership), model, config)
    rank.start(like.forward.limits)
    memory.abort()
    return Follower(rank.forward)
