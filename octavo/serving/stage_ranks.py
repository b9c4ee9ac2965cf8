"""The ranks of one stage of a pipeline over machines, seen from the first of them.

Each machine has a stage, and the process of its first rank starts the others there: the engine's
own process for the last stage, ``octavo.runtime.remote_rank`` for the ones before.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from octavo.base.errors import EngineError, PeerEndedError
from octavo.kernels.cpu.library import usable_threads
from octavo.runtime.followers import Followers
from octavo.runtime.rank_memory import Membership
from octavo.runtime.rank_process import Message
from octavo.runtime.stage_memory import StageMemory
from octavo.system.numa import RankPlace

_log = logging.getLogger("octavo")

_FOLLOWER = "octavo.serving.follower"


class StageRanks:
    """The first rank of a stage, and processes of the others, if there are any.

    Args:
        first: of the first rank, with its links to other machines.
        places: of all ranks of the stage. Nothing is pinned by this.
        settings: as of ``octavo.serving.follower``.

    Raises:
        ConfigError: the system has no memory for them, or starts no process.
    """

    def __init__(self, first: Membership, places: Sequence[RankPlace], settings: Message):
        self.membership = first
        # Ends all waiting on this machine, for ever. May be called from any thread.
        self.abort: Callable[[], object] = _nothing_waits
        self._followers: Followers | None = None
        if len(places) == 1:
            return
        is_crowded = warn_if_crowded(places, usable_threads(), "tensor_parallel_size")
        assert first.pipeline is not None
        memory = StageMemory(first.pipeline, len(places), is_crowded=is_crowded)
        self.membership, self.abort = memory.first, memory.abort
        settings = {**settings, "places": [dataclasses.asdict(place) for place in places]}
        patience_s = settings["spec"]["start_timeout"]
        self._followers = Followers(_FOLLOWER, memory, settings, patience_s=patience_s)

    def wait_for_failure(self) -> EngineError | None:
        """Return the end of a process, once it is known how it came; None if none has ended."""
        return None if self._followers is None else self._followers.wait_for_failure()

    def when_one_ends(self, callback: Callable[[PeerEndedError], object]) -> None:
        """Have ``callback`` called, in a thread of its own, when a process ends by itself."""
        if self._followers is not None:
            self._followers.when_one_ends(callback)

    def send(self, message: Message) -> None:
        """Send a message to all other ranks of the stage."""
        if self._followers is not None:
            self._followers.send(message)

    def receive(self) -> list[Message]:
        """Wait for a message of each of them. PeerEndedError if one has ended instead."""
        return [] if self._followers is None else self._followers.receive()

    def close(self) -> None:
        """End the other ranks. May be repeated."""
        if self._followers is not None:
            self._followers.close()


def _nothing_waits() -> None: ...


def warn_if_crowded(places: Sequence[RankPlace], num_cores: float, setting: str) -> bool:
    """Return whether ranks have more threads than there are cores, and log it with the setting that
    is too large."""
    num_threads = sum(place.num_threads for place in places)
    if num_threads <= num_cores:
        return False
    _log.warning(
        "%d ranks have %d threads for %.3g cores, so they wait for each other: lower %s, or "
        "threads",
        *(len(places), num_threads, num_cores, setting),
    )
    return True
