"""KV blocks in host memory, by content, before a KV storage: a disk, or another replica.

Every place of the host cache is in one of these states::

    idle     in no use; the block that it holds, if any, can be taken. Reused oldest first
    coming   a copy of an unfinished step, or a read from the storage, fills it: not to be taken yet
    in use   a copy reads it, or the storage writes its block

A place counts as filled only when the step of its copy has ended well, or the storage reports a
whole block: no block is taken before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from octavo.core.block_store import NOTHING_STORED, BlockPart, Stored, StoreStats, keys_of
from octavo.core.kv_tables import ONE_TABLE, Windows
from octavo.core.request import Request
from octavo.core.stored_prefix import StoredPrefix


class FinishedTransfer(NamedTuple):
    """A read into a place, or a write from it, that a KV storage has finished or failed."""

    place: int
    is_read: bool
    is_good: bool


class KVStorage(Protocol):
    """A storage behind the host cache, which reads and writes the cache's places asynchronously; by
    default one that keeps nothing."""

    place: str = "disk"
    """Where its blocks lie, in the name of the figure ``prefix_tokens_from_…``."""

    @property
    def figures(self) -> Mapping[str, Any]:
        """Further fields of ``StepStats``, by name."""
        return {}

    @property
    def num_errors(self) -> int:
        return 0

    @property
    def room(self) -> int:
        """Number of blocks that it would accept for writing now."""
        return 0

    @property
    def is_stuck(self) -> bool:
        """True if a transfer takes so long that no request should wait for it."""
        return False

    @property
    def read_seconds(self) -> float:
        """Recent time of reading one block, in seconds."""
        return 0.0

    def __contains__(self, key: bytes) -> bool:
        return False

    def write(self, key: bytes, place: int, before: bytes | None = None) -> bool:
        """Begin to write the block of a place. False: too many are waiting to be written already.

        ``before`` is the key of the block without which this one is of no use, if there is one: a
        storage that fails to keep a block need not keep those that follow it.
        """
        return False

    def read(self, key: bytes, place: int) -> None:
        """Begin to read a block into a place."""
        raise AssertionError("nothing was written")

    def finished_transfers(self) -> Sequence[FinishedTransfer]:
        """Return the transfers that have ended since the last call."""
        return ()

    def wait(self, seconds: float) -> bool:
        """Wait until a transfer has ended; False if none is under way."""
        return False

    def close(self) -> None:
        """Finish the transfers under way, if that takes little time."""
        return None


class _NoStorage(KVStorage):
    """A storage that keeps nothing."""


class RestoreRule(Protocol):
    """The choice between reading KV and computing it again."""

    def is_worth(self, start: int, num_tokens: int, seconds: float) -> bool:
        """Return whether computing so many tokens from position ``start`` on takes longer than
        ``seconds``."""
        ...


class AlwaysRestore:
    """The rule where the time of computing is not known: always read."""

    def is_worth(self, start: int, num_tokens: int, seconds: float) -> bool:
        return True


class HostKVCache:
    """A ``BlockStore`` of ``num_places`` blocks of host memory; place p has the block id ``first_id
    + p``.

    Args:
        block_bytes: size of a block, for statistics.
        storage: receives every block, and keeps it when it is evicted here; None for none.
        windows: the block manager's groups of layers.
    """

    def __init__(
        self,
        first_id: int,
        num_places: int,
        block_size: int,
        block_bytes: int = 0,
        storage: KVStorage | None = None,
        rule: RestoreRule | None = None,
        windows: Windows = ONE_TABLE,
    ):
        self.stats = StoreStats(block_bytes)
        self._has_storage = storage is not None
        self._first_id = first_id
        self._block_size = block_size
        self._windows = windows
        self._storage: KVStorage = storage or _NoStorage()
        self._rule: RestoreRule = rule or AlwaysRestore()
        self._keys: list[bytes | None] = [None] * num_places  # of blocks that are there, or coming
        self._before: list[bytes | None] = [None] * num_places  # of the block before, if needed
        self._num_users = [0] * num_places
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_places))
        self._held: dict[bytes, int] = {}
        self._coming: dict[bytes, int] = {}
        self._were_read: set[bytes] = set()  # from the storage, and not taken since

    @property
    def figures(self) -> Mapping[str, Any]:
        from_storage = {f"prefix_tokens_from_{self._storage.place}": self.stats.tokens_from_storage}
        return {**self.stats.figures, **from_storage, **self._storage.figures}

    # -- from the pool -----------------------------------------------------------------------

    @property
    def saves_ahead(self) -> bool:
        return self._has_storage and not self._storage.is_stuck

    @property
    def has_room(self) -> bool:
        self._collect_transfers()
        return bool(self._idle) and len(self._coming) < self._storage.room

    def offer(
        self,
        block_id: int,
        key_of: Callable[[int], bytes],
        key_before: Callable[[int], bytes | None] = lambda _: None,
    ) -> int | None:
        self._collect_transfers()
        key = key_of(block_id)
        if key in self._held:
            self._touch(key)
            return None
        if key in self._coming or key in self._storage:
            return None
        if not self._idle:
            self.stats.num_dropped += 1
            return None
        place = self._reserve(key)
        self._before[place] = key_before(block_id)
        return self._first_id + place

    def settle(self, copies: Iterable[tuple[int, int]], *, are_done: bool) -> None:
        for source, target in copies:
            if target >= self._first_id:
                self._end_save(target - self._first_id, is_done=are_done)
            elif source >= self._first_id:
                self.stats.num_restored += are_done
                self._release(source - self._first_id)

    def _end_save(self, place: int, *, is_done: bool) -> None:
        key = self._arrive(place, is_good=is_done)
        if is_done:
            self.stats.num_stored += 1
            if self._has_storage:
                if self._storage.write(key, place, self._before[place]):
                    return  # in use until it is written
                self.stats.num_dropped += 1
        self._release(place)

    # -- back to the pool --------------------------------------------------------------------

    def ask(
        self, request: Request, path: Sequence[Sequence[int]], num_known: int, limit: int
    ) -> Stored:
        self._collect_transfers()
        if not self._held and not self._coming and not self._has_storage:
            return NOTHING_STORED
        keys = keys_of(request, limit // self._block_size, self._block_size)
        prefix = StoredPrefix(keys, path, num_known, self._windows, self._block_size)
        ready = max(prefix.counts(self._held.__contains__), default=num_known)
        if not request.awaited_keys and not self._storage.is_stuck:
            request.awaited_keys = self._fetch(prefix, ready)
        if not self._storage.is_stuck and not self._coming.keys().isdisjoint(request.awaited_keys):
            return Stored(is_awaited=True)
        if ready == num_known:
            return NOTHING_STORED
        return Stored((ready - num_known) * self._block_size, prefix.parts(ready))

    def _fetch(self, prefix: StoredPrefix, ready: int) -> tuple[bytes, ...]:
        """Begin to read what makes more than ``ready`` blocks of a request known, as far as there
        is room, and if it is worth while. Returns the keys of all blocks that are coming."""
        counts = [count for count in prefix.counts(self._is_known) if count > ready]
        num_fit = bisect_right(
            counts, len(self._idle), key=lambda count: self._num_needed(prefix.parts(count))
        )
        if not num_fit:
            return ()
        count = counts[num_fit - 1]
        keys = [part.key for part in prefix.parts(count)]
        missing = [key for key in keys if not self._is_in_memory(key)]
        seconds = len(missing) * self._storage.read_seconds
        size = self._block_size
        if not self._rule.is_worth(ready * size, (count - ready) * size, seconds):
            return ()
        for key in reversed(keys):
            if key in self._held:
                self._touch(key)  # so that no other block takes its place
        for key in reversed(missing):  # so the first of them is evicted last
            self._storage.read(key, self._reserve(key))
        return tuple(key for key in keys if key in self._coming)

    def _num_needed(self, parts: Iterable[BlockPart]) -> int:
        """Return the number of idle places that these parts have, or would take."""
        places = (self._held.get(part.key, self._coming.get(part.key)) for part in parts)
        return sum(place is None or place in self._idle for place in places)

    def _is_known(self, key: bytes) -> bool:
        return self._is_in_memory(key) or key in self._storage

    def _is_in_memory(self, key: bytes) -> bool:
        return key in self._held or key in self._coming

    def take(self, stored: Stored) -> list[int]:
        keys = [part.key for part in stored.parts]
        num_read = stored.num_tokens * len(self._were_read.intersection(keys)) // len(keys)
        self.stats.tokens_from_storage += num_read
        self.stats.tokens_from_memory += stored.num_tokens - num_read
        self._were_read.difference_update(keys)
        return [self._first_id + self._use(self._held[key]) for key in keys]

    def _use(self, place: int) -> int:
        self._num_users[place] += 1
        self._idle.pop(place, None)
        return place

    # -- the storage -------------------------------------------------------------------------

    def wait(self, seconds: float) -> bool:
        return self._storage.wait(seconds)

    def close(self) -> None:
        self._storage.close()
        self._collect_transfers()

    def _collect_transfers(self) -> None:
        for place, is_read, is_good in self._storage.finished_transfers():
            if is_read:
                key = self._arrive(place, is_good=is_good)
                if is_good:
                    self._were_read.add(key)
            else:
                self.stats.num_written += is_good
            self._release(place)
        self.stats.num_errors = self._storage.num_errors

    # -- places ------------------------------------------------------------------------------

    def _reserve(self, key: bytes) -> int:
        """Take the oldest idle place, for a block that is to come."""
        place, _ = self._idle.popitem(last=False)
        if (old := self._keys[place]) is not None:
            del self._held[old]
            self._were_read.discard(old)
        self._keys[place] = key
        self._num_users[place] = 1
        self._coming[key] = place
        return place

    def _arrive(self, place: int, *, is_good: bool) -> bytes:
        """Note that a block that was coming is there, or will not come."""
        key = self._keys[place]
        assert key is not None
        del self._coming[key]
        if is_good:
            self._held[key] = place
        else:
            self._keys[place] = None
        return key

    def _release(self, place: int) -> None:
        self._num_users[place] -= 1
        if self._num_users[place] == 0:
            self._idle[place] = None
            if self._keys[place] is None:
                self._idle.move_to_end(place, last=False)

    def _touch(self, key: bytes) -> None:
        if (place := self._held[key]) in self._idle:
            self._idle.move_to_end(place)

    # -- audit -------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        found = []
        idle = {place for place, count in enumerate(self._num_users) if count == 0}
        if idle != set(self._idle) or min(self._num_users, default=0) < 0:
            found.append("a place of the host KV cache is used and idle, or lost")
        named = {key: place for place, key in enumerate(self._keys) if key is not None}
        if named != {**self._held, **self._coming}:
            found.append("keys and places of the host KV cache disagree")
        return found
