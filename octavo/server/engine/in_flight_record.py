"""A record of the requests that the engine is computing, in memory that outlives its process.

The server and the engine's process map the same memory. Before each step the engine writes down
which requests are in it, and before it takes a request in, that request; so when the process has
ended, whatever way, the server knows which requests it was computing. A step of 128 requests takes
5 µs to compare with what is written, and the record is read only after a crash.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque

from octavo.core.batch import Batch
from octavo.core.executor import Executor, ExecutorAround, StepHandle
from octavo.system.nameless_memory import open_memory

_LENGTH = struct.Struct("=I")
NUM_BYTES = 1 << 20  # for 30,000 names, and of no cost where nothing is written


class InFlightRecord:
    """A list of names, written by one process and read by another::

    | bytes of names, uint32 | name, line break, name, ... |
    """

    def __init__(self, memory: mmap.mmap | None = None):
        self._memory = memory or mmap.mmap(-1, NUM_BYTES)
        self._written: list[str] = []

    @classmethod
    def create(cls) -> tuple[InFlightRecord, int]:
        """Return an empty record, and a file descriptor by which another process can `open` it."""
        fd = open_memory("octavo-flight-record", NUM_BYTES)
        try:
            return cls.open(fd), fd
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def open(cls, fd: int) -> InFlightRecord:
        return cls(mmap.mmap(fd, NUM_BYTES))

    def write(self, names: list[str]) -> None:
        """Replace the names. If the process ends during the call, no names are left."""
        if names == self._written:
            return
        self._written = names
        memory, data = self._memory, "\n".join(names).encode()
        end = min(_LENGTH.size + len(data), NUM_BYTES)
        _LENGTH.pack_into(memory, 0, 0)
        memory[_LENGTH.size : end] = data[: end - _LENGTH.size]
        _LENGTH.pack_into(memory, 0, end - _LENGTH.size)

    def read(self) -> list[str]:
        return names_in(self._memory[:])


def names_in(data: bytes) -> list[str]:
    """Return the names of a record's memory, whose zeros at the end may be missing."""
    (size,) = _LENGTH.unpack_from(data.ljust(_LENGTH.size, b"\0"))
    names = data[_LENGTH.size : _LENGTH.size + size]
    return names.decode(errors="replace").split("\n") if names else []


class RecordedExecutor(ExecutorAround):
    """An executor around another one that records the requests of each step before it runs."""

    def __init__(self, executor: Executor, record: InFlightRecord):
        super().__init__(executor)
        self._record = record
        self._in_flight: deque[list[str]] = deque(maxlen=executor.depth)

    def submit(self, batch: Batch) -> StepHandle:
        self._in_flight.append([item.request.request_id for item in batch.items])
        self._record.write([name for names in self._in_flight for name in names])
        return self._executor.submit(batch)
