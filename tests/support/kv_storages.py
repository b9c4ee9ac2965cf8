"""KV storages behind a host KV cache, for tests: without files and threads, late, forgetful and
unreliable."""

from __future__ import annotations

import random
from collections.abc import MutableSequence, Sequence

from octavo.core.host_kv_cache import FinishedTransfer


class SlowStorage:
    """Keeps the rows of a host KV cache as bytes. What it was asked for ends some calls later.

    Args:
        rows: of the host KV cache, each a buffer.
        fails: how often a read finds that what is there is not what was written.
        forgets: how often a block is given up to make room for another.
        refuses: how often it has too much to write to take more.
    """

    def __init__(
        self,
        rows: Sequence[MutableSequence[int]],
        rng: random.Random,
        *,
        delay: int = 0,
        fails: float = 0.0,
        forgets: float = 0.0,
        refuses: float = 0.0,
    ):
        self.place, self.figures = "disk", {}
        self.num_errors = 0
        self.room = len(rows)
        self.is_stuck = False
        self.read_seconds = 0.0
        self.is_closed = False
        self.contents: dict[bytes, bytes] = {}
        self._rows, self._rng = rows, rng
        self._delay, self._fails, self._forgets, self._refuses = delay, fails, forgets, refuses
        # Calls that are left, what is read, and how it will have ended.
        self._left: list[tuple[int, bytes | None, FinishedTransfer]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self.contents

    def write(self, key: bytes, place: int, before: bytes | None = None) -> bool:
        if self._rng.random() < self._refuses:
            return False
        if self.contents and self._rng.random() < self._forgets:
            self.contents.pop(self._rng.choice(list(self.contents)))
        self.contents[key] = bytes(self._rows[place])
        self._begin(None, FinishedTransfer(place, is_read=False, is_good=True))
        return True

    def read(self, key: bytes, place: int) -> None:
        is_good = self._rng.random() >= self._fails
        content = self.contents[key]
        if not is_good:
            self.num_errors += 1
            del self.contents[key]
            content = bytes(len(content))
        # What is there meanwhile is neither the old content nor the new.
        self._rows[place][:] = b"\xaa" * len(content)
        self._begin(content, FinishedTransfer(place, is_read=True, is_good=is_good))

    def _begin(self, content: bytes | None, ended: FinishedTransfer) -> None:
        self._left.append((self._rng.randint(0, self._delay), content, ended))

    def finished_transfers(self) -> list[FinishedTransfer]:
        done = [each for each in self._left if each[0] <= 0]
        self._left = [(calls - 1, *rest) for calls, *rest in self._left if calls > 0]
        for _, content, (place, _, _) in done:
            if content is not None:
                self._rows[place][:] = content
        return [ended for _, _, ended in done]

    def wait(self, seconds: float) -> bool:
        return bool(self._left)

    def close(self) -> None:
        self.is_closed = True
