"""KV that another replica has passed on, as the store of a simulated engine."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.block_store import NOTHING_STORED, BlockStore, Stored
from octavo.core.kv_tables import Windows
from octavo.core.request import Request
from octavo.core.stored_prefix import StoredPrefix


class ArrivedKV(BlockStore):
    """A store that has all blocks of requests whose KV has arrived, until these are over.

    A preempted request has given its blocks up, and computes them again.

    Args:
        num_blocks: of the pool, whose ids come before those of arrived blocks.
        windows: the pool's groups of layers.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Windows):
        self._first_id, self._block_size, self._windows = num_blocks, block_size, windows
        self._request_ids: set[str] = set()
        self.num_tokens = 0  # that were known by it

    def arrive(self, request_id: str) -> None:
        self._request_ids.add(request_id)

    def forget(self, request_id: str) -> None:
        self._request_ids.discard(request_id)

    def ask(
        self, request: Request, path: Sequence[Sequence[int]], num_known: int, limit: int
    ) -> Stored:
        if request.num_preemptions or request.request_id not in self._request_ids:
            return NOTHING_STORED
        size = self._block_size
        keys = [b""] * (limit // size)  # any will do
        prefix = StoredPrefix(keys, path, num_known, self._windows, size)
        counts = prefix.counts(lambda key: True)
        if not counts:
            return NOTHING_STORED
        return Stored((counts[-1] - num_known) * size, prefix.parts(counts[-1]))

    def take(self, stored: Stored) -> Sequence[int]:
        self.num_tokens += stored.num_tokens
        return range(self._first_id, self._first_id + len(stored.parts))
