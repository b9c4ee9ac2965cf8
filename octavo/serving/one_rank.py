"""The ranks of an engine, seen from rank 0, which is the engine's own process.

ranks = OneRank(spec), or open_ranks()  starts the others, which import while this one loads
with ranks.loading():
    rank = source.load_rank(ranks.spec)
ranks.load(rank)                        the others load, from the packed weights that exist now
ranks.capacity(rank)                    what an engine is sized by
ranks.start(rank, limits)               all allocate memory for steps
rank.start(limits)
ranks.wait_until_started(rank)          what the others could not do is an error here
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from octavo.base.errors import PeerEndedError

if TYPE_CHECKING:
    from octavo.runtime.capacity import Capacity, RankLimits, RankSpec
    from octavo.runtime.rank import Rank


class OneRank:
    """An engine that has no further ranks."""

    def __init__(self, spec: RankSpec):
        self.spec = spec

    def loading(self) -> AbstractContextManager[None]:
        """Return a context for the loading of rank 0, in which the end of another rank is a
        ConfigError with its last words."""
        return nullcontext()

    def load(self, rank: Rank) -> None: ...

    def capacity(self, rank: Rank, draft_bytes: int) -> Capacity:
        """Return the capacity of all ranks together.

        Args:
            draft_bytes: KV of a drafter that each token has, too, whichever pool it is in.
        """
        capacity = rank.capacity
        total = capacity.kv_bytes_per_token + capacity.num_pools * draft_bytes
        return dataclasses.replace(capacity, kv_bytes_per_token=total)

    @property
    def info(self) -> dict[str, Any]:
        """Return what the "engine" object of the JSON outputs says about other machines."""
        return {}

    def start(self, rank: Rank, limits: RankLimits) -> None: ...

    def wait_until_started(self, rank: Rank) -> None: ...

    def whole_rows(self, rank: Rank) -> Sequence[memoryview]:
        """Return the blocks of the host KV cache with the KV of all ranks, for what keeps them
        elsewhere. ConfigError if ranks have their parts in memory of their own."""
        return [memoryview(row) for row in rank.host_blocks]

    def when_one_ends(self, callback: Callable[[PeerEndedError], object]) -> None:
        """Have ``callback`` called, in any thread, when another rank has ended by itself: then the
        engine can compute nothing more."""

    def close(self) -> None: ...
