"""`KnownGrammars`, a cache of what is known of constraints, within a bound of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from octavo.core.structured_outputs import StructuredOutputs

MAX_BYTES = 256 << 20
_MAX_COUNT = 1024
_BYTES_PER_CHARACTER = 2  # of a constraint's own text, which is kept beside what is known of it


class Sized(Protocol):
    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes now, which may become more."""
        ...


K = TypeVar("K", bound=Sized)


class KnownGrammars(Generic[K]):
    """A cache by the content of constraints; the least recently used is forgotten. Any threads may
    share it.

    Args:
        max_bytes: of all together. The last one is kept, whatever it takes.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutputs, K] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept."""
        with self._lock:
            return sum(map(_size, self._known.items()))

    def get(self, asked: StructuredOutputs) -> K | None:
        """Return what is known of a constraint, which is used by that."""
        with self._lock:
            if (known := self._known.get(asked)) is not None:
                self._known.move_to_end(asked)
            return known

    def put(self, asked: StructuredOutputs, known: K) -> None:
        """Keep what is known of a constraint."""
        with self._lock:
            self._known[asked] = known
            self._known.move_to_end(asked)
            left = sum(map(_size, self._known.items()))
            while len(self._known) > 1 and (left > self._max_bytes or len(self) > _MAX_COUNT):
                left -= _size(self._known.popitem(last=False))


def _size(item: tuple[StructuredOutputs, Sized]) -> int:
    asked, known = item
    return _BYTES_PER_CHARACTER * len(asked.constraint.text) + known.num_bytes
