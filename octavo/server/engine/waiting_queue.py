"""Those of whom nothing has been computed: how many there may be, and how long they wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.base.errors import QueueFullError
from octavo.core.limits import QueueLimits, RequestWork, WorkBudget
from octavo.cost.first_token import num_pairs
from octavo.server.engine.generation import EngineObserver, Generation

# Where nothing else is said: as many tokens as such a number of requests in a context of 8,192.
DEFAULT_LIMITS = QueueLimits(1024, 1024 * 8192)


@dataclass(eq=False, slots=True)
class PendingGeneration:
    """A generation that is not over."""

    generation: Generation
    fingerprint: bytes
    is_sent: bool = False  # to the engine that runs now
    has_begun: bool = False  # that engine has computed something of it
    last_times: dict[int, float] = field(default_factory=dict)  # of tokens, by sample
    timer: asyncio.TimerHandle | None = None

    @property
    def work(self) -> RequestWork:
        return self.generation.request.work

    @property
    def tenant(self) -> str:
        return self.generation.request.tenant


class QueuedWork(NamedTuple):
    """Those who wait. Samples of one request share its prompt, which counts once: ``num_tokens``
    of prompts, ``num_pairs`` of these with all that they see."""

    num_samples: int
    num_tokens: int
    num_pairs: int

    def plus(self, other: QueuedWork, times: float = 1) -> QueuedWork:
        """These, and so many times others."""
        return QueuedWork(*(round(a + times * b) for a, b in zip(self, other, strict=True)))


_NOTHING = QueuedWork(0, 0, 0)


class WaitingQueue:
    """Counts those who wait, and all that is not over, and refuses further ones when it is full.

    Args:
        limits: of those who wait.
        max_work: tokens of all that wait or run; None is no bound.
    """

    def __init__(self, limits: QueueLimits, observer: EngineObserver, max_work: int | None = None):
        self.limits = limits
        self._observer = observer
        self._queued = WorkBudget(limits)
        self._unfinished = WorkBudget(QueueLimits(None, max_work, are="under way"))
        self._waiting: dict[str, QueuedWork] = {}  # by tenant
        self._begun_times: deque[float] = deque(maxlen=256)

    def work_before(self, tenant: str, num_tokens: int) -> QueuedWork:
        """Those who will begin before a prompt of so many tokens would: all of its tenant, and of
        each other one as much as the tenant itself gets until then (``core/fair_queue.py``)."""
        own = self._waiting.get(tenant, _NOTHING)
        before, given = own, own.num_tokens + num_tokens
        for name, other in self._waiting.items():
            if name != tenant:
                before = before.plus(other, min(1.0, given / max(1, other.num_tokens)))
        return before

    def check_capacity(self, tenant: str) -> None:
        """Raise QueueFullError if nobody of a tenant could come in now."""
        with self._refusal():
            self._queued.check_samples(tenant)

    def check_size(self, work: RequestWork) -> None:
        """Raise InvalidRequestError if so much could never come in."""
        self.limits.check(work)
        self._unfinished.limits.check(work)

    def add(self, entry: PendingGeneration) -> None:
        """Let one in who has come; raises QueueFullError, and tells the observer of it."""
        tenant, work = entry.tenant, entry.work
        with self._refusal("queue_requests"):
            self._queued.check_samples(tenant, work.samples)
        with self._refusal("queue_tokens"):
            self._queued.check_tokens(tenant, work.tokens)
        with self._refusal("work"):
            self._unfinished.check_tokens(tenant, work.tokens)
        self._unfinished.take(tenant, work)
        self._count(entry, 1)

    def note_started(self, entry: PendingGeneration, now: float) -> None:
        """The engine has begun to compute it."""
        entry.has_begun = True
        self._begun_times.append(now)
        self._count(entry, -1)

    def requeue(self, entry: PendingGeneration) -> None:
        """The engine that had it has died."""
        if entry.has_begun:
            entry.has_begun = False
            self._count(entry, 1)

    def remove(self, entry: PendingGeneration) -> None:
        """It is over."""
        self._unfinished.give_back(entry.tenant, entry.work)
        if not entry.has_begun:
            self._count(entry, -1)

    def _count(self, entry: PendingGeneration, sign: int) -> None:
        tenant, num_prompt = entry.tenant, len(entry.generation.request.prompt_token_ids)
        one = QueuedWork(entry.work.samples, num_prompt, num_pairs(num_prompt))
        now = self._waiting.get(tenant, _NOTHING).plus(one, sign)
        if now.num_samples:
            self._waiting[tenant] = now
        else:
            self._waiting.pop(tenant, None)
        change = self._queued.take if sign > 0 else self._queued.give_back
        change(tenant, entry.work)

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
        return min(60.0, max(1.0, self._queued.total.samples / rate))
