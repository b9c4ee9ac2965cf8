"""A `BlockFolder` behind the host KV cache, read and written by a thread beside the steps.

Reads come first, since a request waits for them. Blocks to be written wait in host memory, and are
given up rather than waited for when there are too many.

Blocks are evicted from the last of a sequence to the first. So where a block cannot be written,
since the disk is full, those that follow it may be there already: they are removed, as they cannot
be reached without it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from octavo.core.host_kv_cache import FinishedTransfer, KVStorage
from octavo.offload.block_folder import DamagedBlockError
from octavo.offload.transfer_queue import TransferQueue

_log = logging.getLogger("octavo")

# Share of the host cache that may be waiting to be written: there is always room for reads.
_MOST_WRITES = 0.5
_STUCK_SECONDS = 5.0
# Pause after a block could not be written: a full disk stays full for a while.
_PAUSE_SECONDS = 30.0
_CLOSE_SECONDS = 0.5
# First estimate of reads: bytes per second, and seconds for a file.
_FIRST_RATE, _FIRST_SECONDS = 500e6, 1e-4
_KEPT = 0.8  # weight of earlier reads


class Folder(Protocol):
    """The methods of a `BlockFolder` that are called here."""

    def __contains__(self, name: str) -> bool: ...
    def write(self, name: str, content: memoryview, before: str | None) -> None: ...
    def forget_after(self, name: str) -> None: ...
    def read(self, name: str, content: memoryview) -> None: ...
    def close(self) -> None: ...


class DiskStorage(KVStorage):
    """A ``KVStorage`` whose transfers end, well or not, in an order of their own.

    Its thread ends with the object, if it is not closed before.

    Args:
        rows: the places of the host KV cache.
        identity: what KV depends on beside salt and tokens; blocks of other identities are ignored.
    """

    def __init__(self, folder: Folder, rows: Sequence[memoryview], identity: bytes):
        self._folder, self._identity = folder, identity
        self._most_writes = max(1, int(_MOST_WRITES * len(rows)))
        self._work = _Work(folder, rows)
        self._thread = threading.Thread(
            target=self._work.run, name="octavo-kv-offload", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._work.stop, 0.0)

    @property
    def num_errors(self) -> int:
        return self._work.num_errors

    @property
    def read_seconds(self) -> float:
        return self._work.read_seconds

    @property
    def room(self) -> int:
        return 0 if self._work.is_paused else self._most_writes - self._work.num_writes

    @property
    def is_stuck(self) -> bool:
        return self._work.is_stuck

    def __contains__(self, key: bytes) -> bool:
        return self._name(key) in self._folder

    def write(self, key: bytes, place: int, before: bytes | None = None) -> bool:
        if (
            self._work.is_paused
        ):  # it will not be offered again before those that follow are useless
            self._work.add(_Task("forget after", self._name(key)))
        if self.room <= 0:
            return False
        precursor = None if before is None else self._name(before)
        self._work.add(_Task("write", self._name(key), place, precursor))
        return True

    def read(self, key: bytes, place: int) -> None:
        self._work.add(_Task("read", self._name(key), place))

    def finished_transfers(self) -> Sequence[FinishedTransfer]:
        return self._work.finished_transfers()

    def wait(self, seconds: float) -> bool:
        return self._work.wait(seconds)

    def close(self) -> None:
        """Write the blocks that are waiting, as long as that takes little time."""
        if self._finalizer.detach() is not None:
            self._work.stop(_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)  # then the folder is released

    def _name(self, key: bytes) -> str:
        return hashlib.sha256(self._identity + key).hexdigest()


class _Task(NamedTuple):
    kind: Literal["read", "write", "forget after"]
    name: str
    place: int = -1
    before: str | None = None


class _Work(TransferQueue[_Task]):
    """The reads and writes of a folder."""

    def __init__(self, folder: Folder, rows: Sequence[memoryview]):
        super().__init__()
        self.num_errors = 0
        self.read_seconds = _FIRST_SECONDS + len(rows[0]) / _FIRST_RATE
        self._folder, self._rows = folder, rows
        self._paused_until = 0.0

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    @property
    def is_stuck(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > _STUCK_SECONDS

    def _do(self, task: _Task) -> bool:
        match task.kind:
            case "read":
                return self._read(task)
            case "write":
                return self._write(task)
            case "forget after":
                self._folder.forget_after(task.name)
                return True

    def _release(self) -> None:
        self._folder.close()

    def _read(self, task: _Task) -> bool:
        begin = time.perf_counter()
        try:
            self._folder.read(task.name, self._rows[task.place])
        except FileNotFoundError:
            return False  # it was evicted meanwhile
        except (OSError, DamagedBlockError) as error:
            self.num_errors += 1
            _log.warning("a KV block is computed again: %s", error)
            return False
        taken = time.perf_counter() - begin
        self.read_seconds = _KEPT * self.read_seconds + (1 - _KEPT) * taken
        return True

    def _write(self, task: _Task) -> bool:
        try:
            self._folder.write(task.name, self._rows[task.place], task.before)
        except OSError as error:
            self.num_errors += 1
            self._folder.forget_after(task.name)  # blocks come from the last to the first
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            _log.warning("KV blocks are not written for the next %.0f s: %s", _PAUSE_SECONDS, error)
            return False
        return True
