"""The host KV cache of an engine of several ranks, in memory that all of them share.

Each rank copies its part of a block between its own pool and this memory. What keeps blocks
elsewhere, on a disk or in other replicas, is in the home rank's process and has them whole::

    head      for each rank the number of its copies, on a line of its own
    row 0     the parts of all ranks, in their order, side by side
    row 1 ...

The others make copies when they come to them, in the order of messages, and that may be later than
the home rank makes its own. So each of them counts what it has copied, and who wants a row waits
for all copies that were begun by then.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.system.nameless_memory import open_memory

_LINE_BYTES = 64
# Others are a step behind, or have ended, which ends the engine.
_MOST_SECONDS = 30.0
_PAUSE_SECONDS = 50e-6


class HostFile:
    """The descriptor of such memory, which has no size before it is known what ranks need."""

    def __init__(self, fd: int):
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls) -> HostFile:
        return cls(open_memory("octavo-host-kv", 0))

    def close(self) -> None:
        """Close the descriptor; what is mapped stays. May be repeated."""
        self._close()


class HostMemory:
    """The memory as one rank has it.

    Args:
        part_bytes: of a block, for each rank.
        num_blocks: of the cache.
    """

    def __init__(self, file: HostFile, rank: int, part_bytes: Sequence[int], num_blocks: int):
        head = -(-len(part_bytes) * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        row_bytes = sum(part_bytes)
        size = head + num_blocks * row_bytes
        if os.fstat(file.fd).st_size < size:
            os.ftruncate(file.fd, size)
        data = np.frombuffer(mmap.mmap(file.fd, size), np.uint8)
        lines = data[:head].view(np.int64)
        self.num_copied = lines[:: _LINE_BYTES // lines.itemsize][: len(part_bytes)]
        self.rows: np.ndarray = data[head:].reshape(num_blocks, row_bytes)
        first = sum(part_bytes[:rank])
        self.own = self.rows[:, first : first + part_bytes[rank]]
        self._rank = rank
        self._order = threading.Lock()

    def note_copies(self) -> None:
        """Note that this rank has made the copies of one more message."""
        with self._order:  # which no processor moves what was copied behind
            self.num_copied[self._rank] += 1


class HostRows(Sequence[memoryview]):
    """The rows of the memory, in the process of the home rank. A row is given once all ranks have
    made the copies that were begun by then; any thread may ask for it."""

    def __init__(self, memory: HostMemory):
        self._memory = memory
        self._rows = [memoryview(row) for row in memory.rows]
        self._num_begun = 0

    def begin_copies(self) -> None:
        """Note that a message with copies is about to be sent."""
        self._num_begun += 1

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        """Return a row. TimeoutError if a rank does not come to its copies."""
        begun, deadline = self._num_begun, time.monotonic() + _MOST_SECONDS
        while int(self._memory.num_copied.min()) < begun:
            if time.monotonic() > deadline:
                raise TimeoutError("a rank does not make its copies of KV")
            time.sleep(_PAUSE_SECONDS)
        return self._rows[place]
