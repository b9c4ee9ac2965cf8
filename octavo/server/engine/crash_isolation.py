"""Who may have ended an engine, and what follows from it.

What is known of a death is who was there: the requests of the step that did not end, or the one
that was just being taken in (`InFlightRecord`). A request that waited, or was between two steps of
its own, had nothing to do with it.

- Each of those who were there is *suspected*. It runs again in steps of its own, so that the next
  death tells whether it was the one; and one suspect at a time, so that the steps between them
  are for the others, who go on as ever.
- A suspect that was there alone when a further engine died is *convicted*: it is refused for a
  while, whoever sends it.
- One that comes to its end is acquitted.

So whatever a request does, it ends two engines at most; and nobody is refused for the company that
they had. Requests are told apart by what they ask for: sending one again is no way out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from octavo.server.engine.generation import GenerationRequest
from octavo.server.engine.waiting_queue import PendingGeneration

_MEMORY_SECONDS = 600.0  # for suspicions, and of being refused
_MAX_FINGERPRINTS = 4096  # more than an engine runs at once


def fingerprint(request: GenerationRequest) -> bytes:
    """What makes two requests the same to the engine, but for their luck."""
    allowed = request.params.allowed_token_ids or ()
    params = dataclasses.replace(request.params, seed=None, allowed_token_ids=None)
    digest = hashlib.sha256(repr(params).encode())
    for token_ids in (request.prompt_token_ids, allowed):  # there may be a hundred thousand
        digest.update(f" {len(token_ids)} ".encode())
        digest.update(array("q", token_ids))
    return digest.digest()


@dataclass(slots=True)
class _Suspicion:
    since: float
    is_quarantined: bool


class CrashIsolation:
    """Remembers suspects, and says whose turn it is.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._suspicions: OrderedDict[bytes, _Suspicion] = OrderedDict()  # oldest first
        self._queue: deque[PendingGeneration] = deque()
        self._running: PendingGeneration | None = None

    def is_suspected(self, fingerprint: bytes) -> bool:
        """Convicted or not."""
        return self._find(fingerprint) is not None

    def is_quarantined(self, fingerprint: bytes) -> bool:
        suspicion = self._find(fingerprint)
        return suspicion is not None and suspicion.is_quarantined

    def note_crash(self, fingerprints: Collection[bytes], *, had_company: bool) -> None:
        """An engine has died at work on these requests; and on others, if they had company.

        Nobody waits for a turn any more: there is no engine.
        """
        self._queue.clear()
        self._running = None
        is_certain = len(fingerprints) == 1 and not had_company
        for each in fingerprints:
            is_quarantined = self.is_quarantined(each) or (is_certain and self.is_suspected(each))
            self._suspicions[each] = _Suspicion(self._clock(), is_quarantined)
            self._suspicions.move_to_end(each)
        while len(self._suspicions) > _MAX_FINGERPRINTS:
            self._suspicions.popitem(last=False)

    def clear_suspicion(self, fingerprint: bytes) -> None:
        self._suspicions.pop(fingerprint, None)

    def _find(self, fingerprint: bytes) -> _Suspicion | None:
        suspicion = self._suspicions.get(fingerprint)
        if suspicion is not None and self._clock() - suspicion.since > _MEMORY_SECONDS:
            del self._suspicions[fingerprint]
            return None
        return suspicion

    # -- one at a time -----------------------------------------------------------------------

    def enqueue(self, entry: PendingGeneration) -> None:
        """Have it wait for its turn."""
        self._queue.append(entry)

    def next(self) -> PendingGeneration | None:
        """The one whose turn it is from now on; None if there is none, or another's is not over."""
        if self._running is not None and not self._running.generation.is_over:
            return None
        self._running = None
        while self._queue and self._running is None:
            entry = self._queue.popleft()
            if not entry.generation.is_over:
                self._running = entry
        return self._running
