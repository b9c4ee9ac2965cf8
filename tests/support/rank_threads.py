"""A tensor-parallel group whose ranks are threads of one process.

As ranks in processes of their own they share the group's memory alone: each has its own program, KV
and threads, and learns of steps by messages.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from octavo.base.errors import PeerEndedError
from octavo.kernels.cpu.group import ShmGroup
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.following_forward import Follower, follow
from octavo.runtime.rank import Rank
from octavo.serving.follower import follower_of

_NUM_BYTES = 8 << 30  # of address space


def start_ranks(size: int, spec: RankSpec, model, config, limits: RankLimits) -> Rank:
    """Return rank 0 of a started group, whose other ranks follow until it is collected."""
    home = ShmGroup.create(size, num_bytes=_NUM_BYTES, is_crowded=True)
    failures: list[BaseException] = []
    threads = []
    folder = tempfile.TemporaryDirectory(prefix="octavo-test-")
    spec = replace(spec, meeting_point=Path(folder.name) / "ranks")
    for rank in range(1, size):
        group = ShmGroup.attach(os.dup(home.fd), rank, size, is_crowded=True)
        make = partial(_started, replace(spec, group=group), model, config, limits)
        work = _work(group, make, failures)
        threads.append(threading.Thread(target=work, name=f"rank {rank}", daemon=True))
        threads[-1].start()  # ranks of fused kernels wait for each other while they load
    lead = _started(replace(spec, group=home), model, config, limits)
    lead.failures_of_followers = failures
    weakref.finalize(lead, _end, home, threads, folder)
    return lead


def _started(spec: RankSpec, model, config, limits: RankLimits) -> Rank:
    rank = Rank.of_model(spec, model, config)
    rank.start(limits)
    return rank


def _work(group: ShmGroup, make: Callable[[], Rank], failures: list[BaseException]):
    def work() -> None:
        try:
            follow(group, follower_of(make().forward))
        except PeerEndedError:
            pass
        except BaseException as error:  # the others must not wait for it
            failures.append(error)
            group.abort()

    return work


def _end(
    home: ShmGroup, threads: list[threading.Thread], folder: tempfile.TemporaryDirectory
) -> None:
    home.abort()
    for thread in threads:
        thread.join(10)
    folder.cleanup()


def lone_follower(like: Rank, model, config) -> Follower:
    """Return a follower of a group that has ended: what it is told to compute ends at the first
    meeting."""
    home = ShmGroup.create(2, num_bytes=_NUM_BYTES)
    group = ShmGroup.attach(os.dup(home.fd), 1, 2)
    rank = Rank.of_model(replace(like.spec, group=group), model, config)
    rank.start(like.forward.limits)
    home.abort()
    return Follower(rank.forward)
