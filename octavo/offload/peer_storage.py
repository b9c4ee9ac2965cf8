"""Blocks that other replicas have computed, as a `KVStorage` behind the host KV cache.

A transfer is a hit in a prefix cache that lies further away, and whatever goes wrong with it is a
miss, which is computed: no replica holds blocks for another, or waits for one longer than a bound.

A replica that computes prompts writes blocks into memory that the others read (`SharedBlocks`), or
ask it for (`LinkedBlocks`), where they may be on other machines. A replica that gives answers is
told which blocks are on their way to it (``expect``), and waits for those: as for a disk, while
other requests go on.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from octavo.core.host_kv_cache import FinishedTransfer, KVStorage
from octavo.offload.block_folder import DamagedBlockError
from octavo.offload.shared_blocks import BlockSource, MissingBlockError, SharedBlocks
from octavo.offload.transfer_queue import TransferQueue

_log = logging.getLogger("octavo")

# How long blocks that were announced are waited for: seconds, and bytes a second for their size.
_PATIENCE_SECONDS, _LEAST_RATE = 1.0, 250e6
_LOOK_SECONDS = 0.001  # between two looks for blocks that are awaited
_FIRST_RATE, _FIRST_SECONDS = 2e9, 1e-5  # first estimate of reads
_KEPT = 0.8  # weight of earlier reads
# Seconds without a read after which half of what reads took too long is forgotten: else one slow
# read could keep all others away for ever.
_FORGOTTEN_SECONDS = 10.0
_CLOSE_SECONDS = 0.5
_STUCK_SECONDS = 2.0
_KEY_BYTES = 32  # of a key, without the group of layers
# Announced blocks that are remembered; more are no longer waited for.
_MOST_EXPECTED = 1 << 16
_MOST_AHEAD = 64  # reads whose blocks a source may fetch before their turn

MISS_REASONS = ("late", "overwritten", "peer_ended", "damaged", "unreachable")


class PeerStorage(KVStorage):
    """A storage whose transfers are made by a thread of its own, which ends with it.

    Args:
        rows: the places of the host KV cache.
        identity: what KV depends on beside salt and tokens; blocks of other identities are not
            seen.
        own: where this replica writes the blocks that others may read; None if it writes none.
        peers: the blocks of others, by the number of the replica.
    """

    place = "peers"

    def __init__(
        self,
        rows: Sequence[memoryview],
        identity: bytes,
        own: SharedBlocks | None,
        peers: Mapping[int, BlockSource],
    ):
        self._identity = identity
        self._most_writes = len(rows)
        self._work = _Work(rows, own, peers)
        self._thread = threading.Thread(
            target=self._work.run, name="octavo-kv-transfer", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._work.stop, 0.0)

    # -- KVStorage -------------------------------------------------------------------------------

    @property
    def figures(self) -> Mapping[str, Any]:
        return self._work.figures

    @property
    def num_errors(self) -> int:
        return self._work.misses["damaged"] + self._work.misses["unreachable"]

    @property
    def room(self) -> int:
        return 0 if self._work.own is None else self._most_writes - self._work.num_writes

    @property
    def is_stuck(self) -> bool:
        return self._work.is_stuck

    @property
    def read_seconds(self) -> float:
        return self._work.read_seconds

    def __contains__(self, key: bytes) -> bool:
        work, name = self._work, self._name(key)
        if work.own is not None and name in work.own:
            return True
        return any(name in peer for peer in work.peers.values()) or work.expects(key)

    def write(self, key: bytes, place: int, before: bytes | None = None) -> bool:
        if self.room <= 0:
            return False
        self._work.add(_Task("write", self._name(key), place))
        return True

    def read(self, key: bytes, place: int) -> None:
        self._work.add(_Task("read", self._name(key), place, key[:_KEY_BYTES]))

    def finished_transfers(self) -> Sequence[FinishedTransfer]:
        return self._work.finished_transfers()

    def wait(self, seconds: float) -> bool:
        return self._work.wait(seconds)

    def close(self) -> None:
        if self._finalizer.detach() is not None:
            self._work.stop(_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    # -- what is on its way ----------------------------------------------------------------------

    def expect(self, peer: int, keys: Iterable[bytes]) -> None:
        """Note that a replica is about to write the blocks of these keys, of all groups of layers.

        They count as stored from now on, until they should have come.
        """
        self._work.expect(peer, keys)

    def peer_ended(self, peer: int) -> None:
        """Note that a replica has ended: what it has not written by now does not come."""
        self._work.forget_expected(peer)

    def _name(self, key: bytes) -> bytes:
        return hashlib.sha256(self._identity + key).digest()


class _Task(NamedTuple):
    kind: Literal["read", "write"]
    name: bytes
    place: int
    key: bytes = b""


class _Expected(NamedTuple):
    peer: int
    until: float  # time.monotonic()


class _Work(TransferQueue[_Task]):
    """The reads and writes of shared blocks."""

    def __init__(
        self,
        rows: Sequence[memoryview],
        own: SharedBlocks | None,
        peers: Mapping[int, BlockSource],
    ):
        super().__init__()
        self.own, self.peers = own, peers
        self.misses: Counter[str] = Counter()
        self._rows, self._block_bytes = rows, len(rows[0])
        self._first_estimate = _FIRST_SECONDS + self._block_bytes / _FIRST_RATE
        self._recent_seconds, self._last_read = self._first_estimate, time.monotonic()
        self._num_sent = self._num_received = 0
        self._seconds_sent = self._seconds_received = 0.0
        # What follows is guarded, as the tasks are.
        self._expected: dict[bytes, _Expected] = {}
        self._never_come: set[bytes] = set()  # keys of blocks that are read, of peers that ended

    @property
    def figures(self) -> dict[str, Any]:
        size = self._block_bytes
        return {
            "kv_transfer_bytes_sent": self._num_sent * size,
            "kv_transfer_bytes_received": self._num_received * size,
            "kv_transfer_seconds_sent": self._seconds_sent,
            "kv_transfer_seconds_received": self._seconds_received,
            **{f"kv_transfer_misses_{reason}": self.misses[reason] for reason in MISS_REASONS},
        }

    # -- from the engine's thread ----------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > _STUCK_SECONDS

    @property
    def read_seconds(self) -> float:
        left = 0.5 ** ((time.monotonic() - self._last_read) / _FORGOTTEN_SECONDS)
        return self._first_estimate + left * (self._recent_seconds - self._first_estimate)

    def expects(self, key: bytes) -> bool:
        expected = self._expected.get(key[:_KEY_BYTES])
        if expected is None or not self.peers[expected.peer].is_open:
            return False
        return time.monotonic() < expected.until

    def expect(self, peer: int, keys: Iterable[bytes]) -> None:
        if peer not in self.peers or not self.peers[peer].is_open:
            return
        now, keys = time.monotonic(), list(keys)
        until = now + _PATIENCE_SECONDS + len(keys) * self._block_bytes / _LEAST_RATE
        with self._news:
            for key in keys:
                self._expected.pop(key, None)  # so that the first are those that came first
                self._expected[key] = _Expected(peer, until)
            while self._expected:
                oldest = next(iter(self._expected))
                if now < self._expected[oldest].until and len(self._expected) <= _MOST_EXPECTED:
                    break
                del self._expected[oldest]

    def forget_expected(self, peer: int) -> None:
        with self._news:
            gone = {key for key, expected in self._expected.items() if expected.peer == peer}
            for key in gone:
                del self._expected[key]
            self._never_come.update(gone.intersection(task.key for task in self._reads))
            self._news.notify_all()

    # -- in the thread ---------------------------------------------------------------------------

    def _do(self, task: _Task) -> bool:
        return self._write(task) if task.kind == "write" else self._read(task)

    def _release(self) -> None:
        for region in (self.own, *self.peers.values()):
            if region is not None:
                region.close()

    def _next_task(self) -> _Task | None:
        """Return the next task that can be done, or be given up; None: there will be no more."""
        with self._news:
            while not self._is_stopping:
                task = next(filter(self._is_decided, self._reads), None)
                if task is not None:
                    self._reads.remove(task)
                elif self._writes:
                    task = self._writes.popleft()
                if task is not None:
                    self._busy_since = time.monotonic()
                    return task
                self._news.wait(_LOOK_SECONDS if self._reads else None)
            return None

    def _is_decided(self, task: _Task) -> bool:
        """Return whether a block is there, or does not come any more."""
        return self._source_of(task) is not None or not self.expects(task.key)

    def _source_of(self, task: _Task) -> BlockSource | SharedBlocks | None:
        sources = self.peers.values()
        if self.own is not None and task.name in self.own:
            return self.own
        return next((peer for peer in sources if task.name in peer), None)

    def _write(self, task: _Task) -> bool:
        assert self.own is not None
        begin = time.perf_counter()
        try:
            if task.name not in self.own:  # it may have been written meanwhile
                self.own.write(task.name, self._rows[task.place])
                self._num_sent += 1
        except Exception as error:  # as in `_read`
            _log.warning("a KV block is not passed on: %r", error)
            return False
        self._seconds_sent += time.perf_counter() - begin
        return True

    def _read(self, task: _Task) -> bool:
        begin = time.perf_counter()
        source = self._source_of(task)
        if source is None:
            self.misses[self._why_gone(task)] += 1
            return False
        try:
            source.read(task.name, self._rows[task.place], self._names_ahead(source))
        except MissingBlockError:
            self.misses["overwritten"] += 1
            return False
        except Exception as error:  # whatever it is: those who wait have to learn of it
            is_damaged = isinstance(error, DamagedBlockError)
            self.misses["damaged" if is_damaged else "unreachable"] += 1
            _log.warning("a KV block is computed again: %r", error)
            return False
        taken = time.perf_counter() - begin
        self._num_received += 1
        self._seconds_received += taken
        self._recent_seconds = _KEPT * self.read_seconds + (1 - _KEPT) * taken
        self._last_read = time.monotonic()
        return True

    def _names_ahead(self, source: BlockSource | SharedBlocks) -> Iterator[bytes]:
        """Yield the names of blocks that will be read from a source next."""
        with self._news:
            first = list(islice(self._reads, _MOST_AHEAD))
        yield from (task.name for task in first if self._source_of(task) is source)

    def _why_gone(self, task: _Task) -> str:
        with self._news:
            if task.key in self._never_come:
                self._never_come.discard(task.key)
                return "peer_ended"
            if (expected := self._expected.get(task.key)) is not None:
                return "late" if self.peers[expected.peer].is_open else "unreachable"
        are_open = all(peer.is_open for peer in self.peers.values())
        return "overwritten" if are_open else "unreachable"
