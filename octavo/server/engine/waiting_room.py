"""Those of whom nothing has been computed: how many there may be, and how long they wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.limits import QueueLimits
from octavo.cost.first_token import num_pairs
from octavo.errors import QueueFullError
from octavo.server.engine.generation import Generation, Observer

# Where nothing else is said. The tokens are those of prompts, by sample.
DEFAULT_LIMITS = QueueLimits(1024, 1 << 20)


@dataclass(eq=False, slots=True)
class Entry:
    """A generation that is not over."""

    generation: Generation
    fingerprint: bytes
    is_sent: bool = False  # to the engine that runs now
    has_begun: bool = False  # that engine has computed something of it
    last_times: dict[int, float] = field(default_factory=dict)  # of tokens, by sample
    timer: asyncio.TimerHandle | None = None

    @property
    def num_samples(self) -> int:
        return self.generation.request.params.num_samples

    @property
    def num_tokens(self) -> int:
        return self.num_samples * len(self.generation.request.prompt_token_ids)


class Waiting(NamedTuple):
    """Those who wait. Samples of one request share its prompt, which counts once: ``num_tokens``
    of prompts, ``num_pairs`` of these with all that they see."""

    num_samples: int
    num_tokens: int
    num_pairs: int


class WaitingRoom:
    """Counts those who wait, and refuses further ones when it is full."""

    def __init__(self, limits: QueueLimits, observer: Observer):
        self.limits = limits
        self._observer = observer
        self._num_requests = 0
        self._num_tokens = 0
        self._num_prompt_tokens = 0
        self._num_pairs = 0
        self._begun_times: deque[float] = deque(maxlen=256)

    @property
    def waiting(self) -> Waiting:
        return Waiting(self._num_requests, self._num_prompt_tokens, self._num_pairs)

    def check_room(self) -> None:
        """Raise QueueFullError if nobody could come in now."""
        with self._refusal():
            self.limits.check_requests(self._num_requests)

    def enter(self, entry: Entry) -> None:
        """Let one in who has come; raises QueueFullError, and tells the observer of it."""
        with self._refusal("queue_requests"):
            self.limits.check_requests(self._num_requests, entry.num_samples)
        with self._refusal("queue_tokens"):
            self.limits.check_tokens(self._num_tokens, entry.num_tokens)
        self._count(entry, 1)

    def begin(self, entry: Entry, now: float) -> None:
        """The engine has begun to compute it."""
        entry.has_begun = True
        self._begun_times.append(now)
        self._count(entry, -1)

    def come_back(self, entry: Entry) -> None:
        """The engine that had it has died."""
        if entry.has_begun:
            entry.has_begun = False
            self._count(entry, 1)

    def leave(self, entry: Entry) -> None:
        """It is over."""
        if not entry.has_begun:
            self._count(entry, -1)

    def _count(self, entry: Entry, sign: int) -> None:
        self._num_requests += sign * entry.num_samples
        self._num_tokens += sign * entry.num_tokens
        num_prompt = len(entry.generation.request.prompt_token_ids)
        self._num_prompt_tokens += sign * num_prompt
        self._num_pairs += sign * num_pairs(num_prompt)

    @contextlib.contextmanager
    def _refusal(self, reason: str | None = None) -> Iterator[None]:
        """Tell who is refused when to come again."""
        try:
            yield
        except QueueFullError as error:
            if reason is not None:
                self._observer.on_rejected(reason)
            raise QueueFullError(str(error), self._retry_after()) from None

    def _retry_after(self) -> float:
        """When those who wait now will have begun, as fast as others began lately."""
        times = self._begun_times
        if len(times) < 2:
            return 1.0
        span = max(time.monotonic() - times[0], 0.001)
        rate = len(times) / span
        return min(60.0, max(1.0, self._num_requests / rate))
