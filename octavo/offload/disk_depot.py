"""A folder of blocks behind a shelf: read and written by a thread, beside the steps.

What is read comes first, since somebody waits for it. What is to be written waits in memory, on the
shelf, and is given up rather than waited for when there is too much of it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from octavo.core.shelf import Ended
from octavo.offload.folder import DamagedBlockError

_log = logging.getLogger("octavo")

# Of the shelf, that may be waiting to be written: there is always room for what is read.
_MOST_WRITES = 0.5
_STUCK_SECONDS = 5.0
# After a block could not be written, none is for so long: a full disk stays full for a while.
_PAUSE_SECONDS = 30.0
_CLOSE_SECONDS = 0.5
# Before anything has been read: bytes per second, and what a file takes besides.
_FIRST_RATE, _FIRST_SECONDS = 500e6, 1e-4
_KEPT = 0.8  # of what is known, after each read


class Folder(Protocol):
    """What is asked of a ``BlockFolder``."""

    def __contains__(self, name: str) -> bool: ...
    def write(self, name: str, content: memoryview) -> None: ...
    def read(self, name: str, content: memoryview) -> None: ...
    def close(self) -> None: ...


class DiskDepot:
    """A ``Depot``. What it was asked for ends in the order of ``ended``, and always does.

    Args:
        rows: the places of the shelf.
        identity: what KV depends on beside salt and tokens; blocks of others are not seen.
    """

    def __init__(self, folder: Folder, rows: Sequence[memoryview], identity: bytes):
        self.num_errors = 0
        self.read_seconds = _FIRST_SECONDS + len(rows[0]) / _FIRST_RATE
        self._folder, self._rows, self._identity = folder, rows, identity
        self._most_writes = max(1, int(_MOST_WRITES * len(rows)))
        self._news = threading.Condition()  # guards all that follows
        self._reads: deque[tuple[str, int]] = deque()
        self._writes: deque[tuple[str, int]] = deque()
        self._ended: deque[Ended] = deque()
        self._busy_since: float | None = None
        self._paused_until = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="octavo-kv-offload", daemon=True)
        self._thread.start()

    # -- in the engine's thread ----------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > _STUCK_SECONDS

    @property
    def room(self) -> int:
        if time.monotonic() < self._paused_until:
            return 0
        return self._most_writes - len(self._writes)

    def __contains__(self, key: bytes) -> bool:
        return self._name(key) in self._folder

    def write(self, key: bytes, place: int) -> bool:
        with self._news:
            if self.room <= 0:
                return False
            self._writes.append((self._name(key), place))
            self._news.notify_all()
        return True

    def read(self, key: bytes, place: int) -> None:
        with self._news:
            self._reads.append((self._name(key), place))
            self._news.notify_all()

    def ended(self) -> Sequence[Ended]:
        if not self._ended:  # as nearly always, without the lock
            return ()
        with self._news:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def wait(self, seconds: float) -> bool:
        with self._news:
            if not self._is_at_work():
                return bool(self._ended)
            self._news.wait_for(lambda: self._ended, seconds)
            return True

    def close(self) -> None:
        """Write what is waiting, as long as that does not take long."""
        with self._news:
            self._reads.clear()
            self._news.wait_for(lambda: not self._is_at_work(), _CLOSE_SECONDS)
            self._writes.clear()
            self._is_closing = True
            self._news.notify_all()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._folder.close()

    def _is_at_work(self) -> bool:
        return bool(self._reads or self._writes or self._busy_since is not None)

    def _name(self, key: bytes) -> str:
        return hashlib.sha256(self._identity + key).hexdigest()

    # -- in its own thread ---------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            name, place, is_read = task
            is_good = self._read(name, place) if is_read else self._write(name, place)
            with self._news:
                self._busy_since = None
                self._ended.append(Ended(place, is_read, is_good))
                self._news.notify_all()

    def _next_task(self) -> tuple[str, int, bool] | None:
        """The next one, with whether it is a read; None: there will be no more."""
        with self._news:
            self._news.wait_for(lambda: self._reads or self._writes or self._is_closing)
            if not self._reads and not self._writes:
                return None
            self._busy_since = time.monotonic()
            if self._reads:
                return *self._reads.popleft(), True
            return *self._writes.popleft(), False

    def _read(self, name: str, place: int) -> bool:
        begin = time.perf_counter()
        try:
            self._folder.read(name, self._rows[place])
        except FileNotFoundError:
            return False  # it had to make room meanwhile
        except (OSError, DamagedBlockError) as error:
            self.num_errors += 1
            _log.warning("a KV block is computed again: %s", error)
            return False
        taken = time.perf_counter() - begin
        self.read_seconds = _KEPT * self.read_seconds + (1 - _KEPT) * taken
        return True

    def _write(self, name: str, place: int) -> bool:
        try:
            self._folder.write(name, self._rows[place])
        except OSError as error:
            self.num_errors += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            _log.warning("KV blocks are not written for the next %.0f s: %s", _PAUSE_SECONDS, error)
            return False
        return True
