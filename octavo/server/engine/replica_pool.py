"""`ReplicaPool`: the requests that wait for one of the replicas which do the same work."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.disaggregation import Role
from octavo.core.fair_queue import FairQueue
from octavo.core.routing import Router
from octavo.server.engine.waiting_queue import PendingGeneration


class ReplicaPool:
    """A queue that is fair among tenants, and the router that chooses among the pool's replicas.

    ``role``: of its replicas; None where each computes whole requests.
    """

    def __init__(self, router: Router, role: Role | None = None):
        self.router = router
        self.role = role
        self.queue: FairQueue[PendingGeneration] = FairQueue()

    def add(self, entry: PendingGeneration) -> None:
        self.queue.add(entry)
        entry.pool, entry.is_queued = self, True

    def remove(self, entry: PendingGeneration) -> None:
        self.queue.remove(entry)
        entry.is_queued = False

    def admit(self, entry: PendingGeneration, num_tokens: int) -> None:
        """Take out a request that is sent, and charge what will be computed of its prompt."""
        self.queue.admit(entry, num_tokens)
        entry.is_queued = False

    def in_order(self) -> Iterator[PendingGeneration]:
        """See `FairQueue.in_order`."""
        return self.queue.in_order()
