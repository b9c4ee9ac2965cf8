"""Find the request that crashes the engine, and keep it from doing so again.

What is known of a crash is which requests were being computed: those of the step that did not end,
or the one that was just being added (`InFlightRecord`). A request that waited, or was between two
steps of its own, had nothing to do with it.

- Each request that was being computed is *suspected*. It runs again isolated, in steps of its own,
  so that the next crash tells whether it was the cause; and one suspect at a time, so that other
  requests get the steps between.
- A suspect that was alone in the step in which a further engine died is *quarantined*: it is
  refused for a while, whichever client sends it.
- A suspect that gets beyond the point of the crash runs with others again, and the next suspect
  takes its place. It remains suspected: should it be in a second crash, it runs isolated to its
  end.
- A suspect that comes to its end is cleared.

So a request ends two engines at most, or three if it does so at different points; and no request is
refused because of others in its batch.
Requests are told apart by what they ask for: sending one again is no way out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from octavo.server.engine.generation import GenerationRequest
from octavo.server.engine.waiting_queue import PendingGeneration

_MEMORY_SECONDS = 600.0  # after which suspicions and quarantines end
_MAX_FINGERPRINTS = 4096  # more than an engine runs at once


def fingerprint(request: GenerationRequest) -> bytes:
    """Return a digest that two requests share if they are the same to the engine, but for their
    seeds."""
    allowed = request.params.allowed_token_ids or ()
    params = dataclasses.replace(request.params, seed=None, allowed_token_ids=None)
    lora = "" if request.lora is None else request.lora.digest
    digest = hashlib.sha256(repr((params, request.pooling, lora)).encode())
    for token_ids in (request.prompt_token_ids, allowed):  # there may be a hundred thousand
        digest.update(f" {len(token_ids)} ".encode())
        digest.update(array("q", token_ids))
    return digest.digest()


@dataclass(slots=True)
class _Suspicion:
    since: float
    is_quarantined: bool
    num_crashes: int


class CrashIsolation:
    """The suspected and quarantined requests, and the queue of suspects for isolated runs.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._suspicions: OrderedDict[bytes, _Suspicion] = OrderedDict()  # oldest first
        self._queue: dict[PendingGeneration, None] = {}  # in order
        self._running: PendingGeneration | None = None

    def is_suspected(self, fingerprint: bytes) -> bool:
        """True if it was in a step that crashed, quarantined or not."""
        return self._find(fingerprint) is not None

    def is_quarantined(self, fingerprint: bytes) -> bool:
        suspicion = self._find(fingerprint)
        return suspicion is not None and suspicion.is_quarantined

    def note_crash(self, fingerprints: Collection[bytes], *, had_company: bool) -> None:
        """Suspect the requests that a dead engine was computing, or quarantine the only one.

        Args:
            had_company: whether it computed others, too, which are not known any more.
        """
        is_certain = len(fingerprints) == 1 and not had_company
        for each in fingerprints:
            is_quarantined = self.is_quarantined(each) or (is_certain and self.is_suspected(each))
            before = self._find(each)
            num_crashes = 1 if before is None else before.num_crashes + 1
            self._suspicions[each] = _Suspicion(self._clock(), is_quarantined, num_crashes)
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
        """Queue a suspect for an isolated run. No error if it waits already."""
        self._queue[entry] = None

    def next(self) -> PendingGeneration | None:
        """Return the suspect to run now; None if there is none, or the last one still runs.

        It is out of the queue when it is `started`.
        """
        if self._running is not None and self.is_running(self._running):
            return None
        for entry in list(self._queue):
            if not entry.generation.is_over:
                return entry
            del self._queue[entry]
        return None

    def started(self, entry: PendingGeneration) -> None:
        """Note that a suspect runs: no other one does until it is over, or its engine dies."""
        self._queue.pop(entry, None)
        self._running = entry

    def release(self, entry: PendingGeneration) -> bool:
        """Let the suspect that runs share steps with others, if it was in one crash only; return
        whether it may."""
        suspicion = self._find(entry.fingerprint)
        if suspicion is not None and suspicion.num_crashes > 1:
            return False
        self._running = None
        return True

    def is_running(self, entry: PendingGeneration) -> bool:
        """True if it is the suspect that runs."""
        return entry is self._running and entry.is_sent and not entry.generation.is_over
