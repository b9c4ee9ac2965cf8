"""KV blocks in memory that several processes map: one writes them in turn, the others read.

A region has a head, a table with an entry for each slot, and the slots::

    head    magic, bytes of a block, number of slots, count of blocks written so far, identity
    entry   number, checksum, name     block n is in slot n % slots, and its entry has number n + 1
    slot    the block

The newest blocks overwrite the oldest, wanted or not: a reader holds nothing, and has nothing to
give back. It copies a block, and then compares the entry and the checksum again; what
was overwritten meanwhile, or cut short when the writer was killed, is not there. The next writer
goes on behind the last whole block.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable
from typing import Protocol

from octavo.offload.block_folder import DamagedBlockError

_log = logging.getLogger("octavo")

_MAGIC = 0x4F43_544B_5600_0001  # "OCTKV", and the version of this format
_HEAD = struct.Struct("<QQQQ32s")  # magic, bytes of a block, slots, count, identity
_HEAD_BYTES = 4096
_COUNT_AT = 24
_ENTRY = struct.Struct("<QQ32s")  # number + 1, checksum, name
_ENTRY_BYTES = 64
_NUMBER = struct.Struct("<Q")


class MissingBlockError(LookupError):
    """The block is not there, or no longer."""


class BlockSource(Protocol):
    """Blocks of another replica, by name."""

    @property
    def is_open(self) -> bool:
        """True if blocks may come: where it is False, none is waited for."""
        return True

    def __contains__(self, name: bytes) -> bool: ...

    def read(self, name: bytes, content: memoryview, ahead: Iterable[bytes] = ()) -> None:
        """Copy a block into ``content``.

        ``ahead`` are the names of blocks that will be read next, in their order: a source that is
        far away may fetch them meanwhile.

        Raises:
            MissingBlockError: it is not there.
            DamagedBlockError: what is there is something else.
            OSError: the other replica cannot be reached.
        """
        ...

    def close(self) -> None: ...


def create_region(num_bytes: int) -> int:
    """Return the descriptor of a new region, which has no name and cannot shrink or grow. Its pages
    take memory when they are first written.

    Raises:
        OSError: the system gives none.
    """
    import fcntl  # there is none on Windows

    descriptor = os.memfd_create("octavo-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_only(descriptor: int) -> int:
    """Return a descriptor of the same region through which nothing can be written."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def slots_that_fit(num_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks in a region of so many bytes."""
    return max(0, (num_bytes - _HEAD_BYTES) // (block_bytes + _ENTRY_BYTES))


class _Region:
    """A mapped region, for blocks of one size."""

    def __init__(self, descriptor: int, block_bytes: int, access: int):
        num_bytes = os.fstat(descriptor).st_size
        self.block_bytes = block_bytes
        self.num_slots = slots_that_fit(num_bytes, block_bytes)
        if not self.num_slots:
            raise ValueError(f"a region of {num_bytes} bytes has no room for {block_bytes}")
        self.memory = mmap.mmap(descriptor, num_bytes, access=access)
        self._view = memoryview(self.memory)
        self._first = _HEAD_BYTES + self.num_slots * _ENTRY_BYTES

    @property
    def head(self) -> tuple[int, int, int, int, bytes]:
        return _HEAD.unpack_from(self.memory)

    @property
    def count(self) -> int:
        """Number of blocks that were written so far."""
        return int(_NUMBER.unpack_from(self.memory, _COUNT_AT)[0])

    def entry_at(self, number: int) -> int:
        return _HEAD_BYTES + number % self.num_slots * _ENTRY_BYTES

    def entry(self, number: int) -> tuple[int, int, bytes]:
        """Return the number, the checksum and the name in the slot of a block."""
        found, checksum, name = _ENTRY.unpack_from(self.memory, self.entry_at(number))
        return found - 1, checksum, name

    def content(self, number: int) -> memoryview:
        start = self._first + number % self.num_slots * self.block_bytes
        return self._view[start : start + self.block_bytes]

    def recent(self, count: int) -> range:
        """Return the numbers of the blocks that may still be there after ``count``."""
        return range(max(0, count - self.num_slots), count)

    def close(self) -> None:
        self._view.release()
        self.memory.close()


class SharedBlocks:
    """The writer of a region. ``write`` and ``read`` are called by one thread, and
    ``__contains__`` by any.

    Args:
        descriptor: of the region. What an earlier writer of the same blocks left there is kept.
        identity: what the content of blocks depends on beside their names.

    Raises:
        ValueError: there is no room for a block.
    """

    def __init__(self, descriptor: int, block_bytes: int, identity: bytes):
        self._region = region = _Region(descriptor, block_bytes, mmap.ACCESS_WRITE)
        self._numbers: dict[bytes, int] = {}
        format_ = (_MAGIC, block_bytes, region.num_slots)
        magic, old_bytes, old_slots, self._count, old_identity = region.head
        if (magic, old_bytes, old_slots, old_identity) == (*format_, identity):
            self._take_over()
            return
        self._count = 0
        _HEAD.pack_into(region.memory, 0, 0, 0, 0, 0, bytes(32))
        for number in range(region.num_slots):
            _NUMBER.pack_into(region.memory, region.entry_at(number), 0)
        _HEAD.pack_into(region.memory, 0, *format_, 0, identity)

    def _take_over(self) -> None:
        for number in self._region.recent(self._count):
            found, _, name = self._region.entry(number)
            if found == number:
                self._numbers[name] = number

    def __contains__(self, name: bytes) -> bool:
        """Return whether a block is there, and will be for a while: half of the slots are
        overwritten before its own is."""
        number = self._numbers.get(name)
        return number is not None and self._count - number <= self._region.num_slots // 2

    def write(self, name: bytes, content: memoryview) -> None:
        region, number = self._region, self._count
        entry_at = region.entry_at(number)
        found, _, old = region.entry(number)
        if found >= 0 and self._numbers.get(old) == found:
            del self._numbers[old]
        _NUMBER.pack_into(region.memory, entry_at, 0)
        region.content(number)[:] = content
        _ENTRY.pack_into(region.memory, entry_at, 0, _checksum(name, content), name)
        _NUMBER.pack_into(region.memory, entry_at, number + 1)
        self._numbers[name] = number
        self._count = number + 1
        _NUMBER.pack_into(region.memory, _COUNT_AT, self._count)

    def read(self, name: bytes, content: memoryview, ahead: Iterable[bytes] = ()) -> None:
        """See `BlockSource.read`."""
        number = self._numbers.get(name)
        if number is None:
            raise MissingBlockError
        check(name, content, _copy(self._region, number, name, content))

    def close(self) -> None:
        self._region.close()


class SharedBlocksReader(BlockSource):
    """The blocks of a region that another process writes. Any thread may call it.

    Args:
        descriptor: of the region, which may be empty still, or be written by several processes one
            after the other. Blocks of other sizes or identities are not seen.

    Raises:
        ValueError: there is no room for a block.
    """

    def __init__(self, descriptor: int, block_bytes: int, identity: bytes):
        self._region = _Region(descriptor, block_bytes, mmap.ACCESS_READ)
        self._format = (_MAGIC, block_bytes, self._region.num_slots, identity)
        self._lock = threading.Lock()  # of what follows
        self._numbers: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}  # by number
        self._num_seen = 0
        self._has_warned = False

    @property
    def is_other(self) -> bool:
        """True if it is written for other blocks than these: of another model, or another type."""
        magic, block_bytes, num_slots, _, identity = self._region.head
        return bool(magic) and (magic, block_bytes, num_slots, identity) != self._format

    @property
    def count(self) -> int:
        """Number of blocks that were written so far."""
        return self._region.count

    def __contains__(self, name: bytes) -> bool:
        if self._region.count != self._num_seen:
            self._look()
        return name in self._numbers

    def _look(self) -> None:
        """Take in what was written since the last look."""
        region = self._region
        with self._lock:
            count = region.count
            if count < self._num_seen or self.is_other:  # there is another writer
                self._numbers.clear()
                self._names.clear()
                self._num_seen = 0
                if self.is_other:
                    self._warn()
                    return
            recent = region.recent(count)
            for number in range(max(self._num_seen, recent.start), count):
                found, _, name = region.entry(number)
                if found == number:
                    self._numbers[name] = number
                    self._names[number] = name
            while self._names and (oldest := next(iter(self._names))) < recent.start:
                name = self._names.pop(oldest)
                if self._numbers[name] == oldest:
                    del self._numbers[name]
            self._num_seen = count

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "another replica passes on KV of another model, or of another type, than this one "
                "has: it is not read. Was the file of the model replaced? Restart the server"
            )

    def names_since(self, number: int) -> tuple[list[bytes], int]:
        """Return the names of blocks that are there, from the one of a number on in the order in
        which they were written, and the number of the next one."""
        self._look()
        with self._lock:
            first = max(number, self._region.recent(self._num_seen).start)
            numbers = range(first, self._num_seen)
            return [self._names[at] for at in numbers if at in self._names], self._num_seen

    def read(self, name: bytes, content: memoryview, ahead: Iterable[bytes] = ()) -> None:
        check(name, content, self.copy(name, content))

    def copy(self, name: bytes, content: memoryview) -> int:
        """Copy a block into ``content``, and return the checksum that it should have.

        Raises:
            MissingBlockError: it is not there.
        """
        number = self._numbers.get(name) if name in self else None
        if number is None:
            raise MissingBlockError
        return _copy(self._region, number, name, content)

    def close(self) -> None:
        self._region.close()


def _copy(region: _Region, number: int, name: bytes, content: memoryview) -> int:
    content[:] = region.content(number)
    found, checksum, found_name = region.entry(number)  # after the copy: nothing was overwritten
    if (found, found_name) != (number, name):
        raise MissingBlockError
    return checksum


def check(name: bytes, content: memoryview, checksum: int) -> None:
    """Raise DamagedBlockError if the block of a name has another checksum than it should have."""
    if _checksum(name, content) != checksum:
        raise DamagedBlockError(f"block {name.hex()[:16]} of another replica has a wrong checksum")


def _checksum(name: bytes, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(name))
