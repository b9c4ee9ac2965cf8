"""The ranks of a tensor-parallel group: processes on one machine that share a mapping.

    home = ShmGroup.create(2)                         in the engine's process, which is rank 0
    follower = ShmGroup.attach(fd, rank=1, size=2)    in the other, which has inherited home.fd

The mapping begins with what csrc/group.cpp needs to meet and to send messages. The rest is for
activations, which all ranks read and write: :meth:`ShmGroup.allocate` deals it out. Pages exist
once they are written, and go with the last process that maps them: there is no name, and no file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from octavo.base.errors import ConfigError, EngineError
from octavo.kernels.cpu.library import Library, load

# Address space of a group, of which pages are taken as they are written.
_NUM_BYTES = 64 << 30
# Words that a message may have: 64 MB, of which pages are taken as they are written.
_MAX_MESSAGE_WORDS = 16 << 20
_LINE_BYTES = 64
# Of csrc/group.cpp: the ring of messages, and the words of a piece of one.
_NUM_SLOTS = 16
_PIECE_WORDS = ((64 << 10) - 64) // 4
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python since 3.13


class GroupCounts(NamedTuple):
    """Counts of one rank: its meetings, and the messages that it has sent or received."""

    meetings: int
    messages: int
    message_bytes: int


class ShmGroup:
    """A rank's access to its group; passes as the ``oct_group*`` of ctypes functions.

    ``fd`` is the descriptor of the memory, for processes that shall attach to it. Calls are made
    from one thread at a time, but for :meth:`abort`. Once the group is aborted, all of them raise
    PeerEndedError, in every rank.
    """

    def __init__(self, fd: int, rank: int, size: int, is_crowded: bool, library: Library | None):
        self.rank, self.size, self.is_crowded = rank, size, is_crowded
        self.fd = fd
        self._library = library or load()
        self._memory = _map(fd)
        self._when_aborted: list[Callable[[], object]] = []
        self._used = self._library.check(self._library.lib.oct_group_bytes(size))
        address = self._memory.ctypes.data
        handle = self._library.lib.oct_group_open(address, rank, size, is_crowded)
        if not handle:
            raise EngineError(f"the memory of a group: {self._library.last_error()}")
        self._as_parameter_ = ctypes.c_void_p(handle)
        self._message = np.empty(0 if rank == 0 else _MAX_MESSAGE_WORDS, dtype=np.int32)
        self._message_at = self._message.ctypes.data
        self._close = weakref.finalize(
            self, _close, self._library, self._as_parameter_, fd, self._memory
        )

    @classmethod
    def create(
        cls,
        size: int,
        *,
        num_bytes: int = _NUM_BYTES,
        is_crowded: bool = False,
        library: Library | None = None,
    ) -> ShmGroup:
        """Create the memory of a group of ``size`` ranks, and open it as its rank 0.

        Args:
            num_bytes: the size of the mapping, of which only what is written takes memory.
            is_crowded: there are more threads than cores, so that waiting goes to sleep sooner.

        Raises:
            ConfigError: the system has no such memory.
        """
        library = library or load()
        if sys.platform != "linux":
            raise ConfigError("processes can share activations only on Linux")
        least = library.check(library.lib.oct_group_bytes(size))
        fd = os.memfd_create("octavo-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(num_bytes, least))
            _seal(fd)
            return cls(fd, 0, size, is_crowded, library)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"no memory that {size} processes share: {error}") from error
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(
        cls,
        fd: int,
        rank: int,
        size: int,
        *,
        is_crowded: bool = False,
        library: Library | None = None,
    ) -> ShmGroup:
        """Open the memory of a group as its rank ``rank``. The descriptor is the group's from then
        on, and closed with it."""
        return cls(fd, rank, size, is_crowded, library)

    @property
    def handle(self) -> int | None:
        """The address of the ``oct_group``, for structs."""
        return self._as_parameter_.value

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return memory of the group: zeros, uint8 [num_bytes] aligned to a cache line.

        All ranks allocate the same sizes in the same order, and so get the same memory.

        Raises:
            ConfigError: the mapping is used up.
        """
        start = -(-self._used // _LINE_BYTES) * _LINE_BYTES
        if num_bytes < 0 or start + num_bytes > len(self._memory):
            raise ConfigError(
                f"a group of {self.size} ranks shares {len(self._memory):,} bytes, of which "
                f"{start:,} are in use: {num_bytes:,} more are wanted"
            )
        self._used = start + num_bytes
        return self._memory[start : start + num_bytes]

    @property
    def room(self) -> int:
        """Number of pieces of messages that may be unread before `send` waits."""
        return _NUM_SLOTS

    def pieces(self, num_words: int) -> int:
        """Return how many pieces a message of so many words has."""
        return -(-num_words // _PIECE_WORDS)

    def send(self, words: array[int]) -> None:
        """Send a message, one number or more of type "i", to all other ranks: as rank 0. Waits
        while they have not yet read what was sent before."""
        assert words.typecode == "i"
        self._library.check(self._library.lib.oct_group_send(self, *words.buffer_info()))

    def receive(self) -> np.ndarray:
        """Wait for the next message, and return it. It is valid until the next call.

        Raises:
            EngineError: the memory has something that cannot be a message.
        """
        message = self._message
        code = self._library.lib.oct_group_receive(self, self._message_at, len(message))
        return message[: self._library.check(code)]

    def meet(self, stop: bool = False) -> bool:
        """Wait for all ranks. Returns whether any of them said ``stop``."""
        return bool(self._library.check(self._library.lib.oct_group_meet(self, stop)))

    def abort(self) -> None:
        """End all waiting, of all ranks, for ever. May be called from any thread."""
        self._library.lib.oct_group_abort(self)
        for callback in self._when_aborted:
            callback()

    def when_aborted(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called in the thread that aborts the group, if one of this process
        does."""
        self._when_aborted.append(callback)

    @property
    def counts(self) -> GroupCounts:
        meetings, messages, message_bytes = (ctypes.c_int64() for _ in range(3))
        self._library.lib.oct_group_counts(
            self, *map(ctypes.byref, (meetings, messages, message_bytes))
        )
        return GroupCounts(meetings.value, messages.value, message_bytes.value)

    def close(self) -> None:
        """Leave the group; the memory stays mapped as long as arrays of it are used. The others are
        not told: :meth:`abort` does that."""
        self._close()
        self._as_parameter_ = ctypes.c_void_p(None)
        self._memory = np.empty(0, dtype=np.uint8)

    def __enter__(self) -> ShmGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map(fd: int) -> np.ndarray:
    mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
    return np.frombuffer(mapping, dtype=np.uint8)


def _seal(fd: int) -> None:
    """Fix the size of the memory: a process that cut it would end the others with SIGBUS."""
    import fcntl

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _close(library: Library, handle: ctypes.c_void_p, fd: int, memory: np.ndarray) -> None:
    library.lib.oct_group_close(handle)  # which reads nothing of the memory
    os.close(fd)
