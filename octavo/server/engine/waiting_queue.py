"""Admission control that limits how many requests, and how much work, may wait in the queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.base.errors import QueueFullError
from octavo.core.limits import QueueLimits, RequestWork, WorkBudget
from octavo.cost.first_token import num_pairs
from octavo.server.engine.generation import EngineObserver, Generation
from octavo.server.engine.output_record import OutputRecord

if TYPE_CHECKING:
    from octavo.core.disaggregation import Role
    from octavo.core.fair_queue import FairQueue
    from octavo.core.routing import Ask

# Defaults: 1,024 requests, and as many tokens as these have in a context of 8,192.
DEFAULT_LIMITS = QueueLimits(1024, 1024 * 8192)


class EngineLink(Protocol):
    """An engine, to which messages can be sent."""

    def send(self, message: dict[str, Any]) -> None: ...


class RequestPool(Protocol):
    """The requests that wait for replicas of a role: a `ReplicaPool`."""

    role: Role | None
    queue: FairQueue[PendingGeneration]

    def remove(self, entry: PendingGeneration) -> None:
        """Take a request out of the queue."""
        ...


@dataclass(eq=False, slots=True)
class PendingGeneration:
    """A generation that is not over, with its state in the engine.

    ``record`` is kept where another engine may go on with it. With several engines, ``ask`` is what
    their router is told of it, and ``is_queued`` says whether it waits for a place at one, in a
    queue of a ``pool`` where ``queue_key`` and ``turn`` are its place (``core/fair_queue.py``).
    ``kv_from``: the replica that passes on the KV of its prompt, and of how many tokens.
    """

    generation: Generation
    fingerprint: bytes
    engine: EngineLink | None = None  # that has it
    has_begun: bool = False  # that engine has computed something of it
    last_times: dict[int, float] = field(default_factory=dict)  # of tokens, by sample
    timer: asyncio.TimerHandle | None = None
    record: OutputRecord | None = None
    # Run isolated, it is beyond the point where its last engine died when it has so many tokens.
    release_at: int | None = None
    num_recalls: int = 0  # times that it was taken back from an engine that went on running
    ask: Ask | None = None
    pool: RequestPool | None = None
    kv_from: tuple[int, int] | None = None
    is_queued: bool = False
    queue_key: tuple[int, int] = (0, 0)
    turn: int = 0

    @property
    def is_sent(self) -> bool:
        return self.engine is not None

    @property
    def sent_id(self) -> str:
        """Its name in messages: another one after each recall, since an engine may still report
        what it did before it heard of that."""
        request_id = self.generation.request.request_id
        return f"{request_id}~{self.num_recalls}" if self.num_recalls else request_id

    @property
    def token_ids(self) -> Sequence[int]:
        return self.generation.request.prompt_token_ids

    @property
    def weight(self) -> float:
        return self.generation.request.weight

    @property
    def work(self) -> RequestWork:
        return self.generation.request.work

    @property
    def tenant(self) -> str:
        return self.generation.request.tenant


class QueuedWork(NamedTuple):
    """The work of waiting requests.

    Samples of one request share its prompt, which counts once: ``num_tokens`` is of prompts, and
    ``num_pairs`` the pairs of a prompt token and a token that it attends to.
    """

    num_samples: int
    num_tokens: int
    num_pairs: int

    def plus(self, other: QueuedWork, times: float = 1) -> QueuedWork:
        """Return this work plus ``times`` another."""
        return QueuedWork(*(round(a + times * b) for a, b in zip(self, other, strict=True)))


_NOTHING = QueuedWork(0, 0, 0)


class WaitingQueue:
    """Counts the requests that wait, and the work of all that are not over, within limits.

    Args:
        limits: of the requests that wait.
        max_work: tokens of all requests that wait or run; None is no bound.
    """

    def __init__(self, limits: QueueLimits, observer: EngineObserver, max_work: int | None = None):
        self.limits = limits
        self._observer = observer
        self._queued = WorkBudget(limits)
        self._unfinished = WorkBudget(QueueLimits(None, max_work, are="under way"))
        self._waiting: dict[str, QueuedWork] = {}  # by tenant
        self._begun_times: deque[float] = deque(maxlen=256)

    def work_before(self, tenant: str, num_tokens: int) -> QueuedWork:
        """Return the work that will begin before a prompt of so many tokens would.

        That is all of its tenant, and of each other tenant as much as the tenant itself gets until
        then (``core/fair_queue.py``).
        """
        own = self._waiting.get(tenant, _NOTHING)
        before, given = own, own.num_tokens + num_tokens
        for name, other in self._waiting.items():
            if name != tenant:
                before = before.plus(other, min(1.0, given / max(1, other.num_tokens)))
        return before

    def check_capacity(self, tenant: str) -> None:
        """Raise QueueFullError if no request of a tenant could be added now."""
        with self._refusal():
            self._queued.check_samples(tenant)

    def check_size(self, work: RequestWork) -> None:
        """Raise InvalidRequestError if so much could not be added even to an empty queue."""
        self.limits.check(work)
        self._unfinished.limits.check(work)

    def add(self, entry: PendingGeneration) -> None:
        """Add a request; raise QueueFullError, and tell the observer, if that is over a limit."""
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
        """Count a request as running: the engine has begun to compute it."""
        entry.has_begun = True
        self._begun_times.append(now)
        self._count(entry, -1)

    def requeue(self, entry: PendingGeneration) -> None:
        """Count a request as waiting again: the engine that had it has died."""
        if entry.has_begun:
            entry.has_begun = False
            self._count(entry, 1)

    def remove(self, entry: PendingGeneration) -> None:
        """Stop counting a request, which is over."""
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
        """Add to a QueueFullError when to try again."""
        try:
            yield
        except QueueFullError as error:
            if reason is not None:
                self._observer.on_rejected(reason)
            raise QueueFullError(str(error), self._retry_after()) from None

    def _retry_after(self) -> float:
        """Return the seconds until the waiting requests will have begun, at the recent rate."""
        times = self._begun_times
        if len(times) < 2:
            return 1.0
        span = max(time.monotonic() - times[0], 0.001)
        rate = len(times) / span
        return min(60.0, max(1.0, self._queued.total.samples / rate))
