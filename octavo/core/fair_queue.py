"""The queue of waiting requests, fair among tenants by the tokens that each gets.

Every tenant has a counter of the tokens that it was given, divided by its weight, and the next
place goes to the tenant with the lowest counter (the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024). Within a tenant, requests come by priority
and arrival, ``Request.queue_key``; a preempted request keeps its place there.

Tokens are counted when they are given: prompt tokens that have to be computed, when the request is
admitted (what the prefix cache has is free); output tokens, as they come. Deficit round robin would
have to subtract the length of an answer before it is known: a request that may have 8,192 tokens
and ends after twenty would pay for all of them, or a quantum would stand for an estimate. Tokens
that are computed again after a preemption are not counted.

Three rules make it fair over time:

- Tokens count only while requests wait. A tenant that uses what no other wants owes nothing for it;
  and when the queue is empty, all counters are even again.
- A tenant that begins to wait is lifted to the lowest counter of those that wait: a tenant that
  asked for nothing has saved nothing up. What it owes it keeps.
- Among equals, the tenant that was served longest ago comes first.

So between any two tenants that wait all the time, what they were given differs by no more than what
is bounded beforehand: a prompt, and what the running requests of one of them bring until they end,
since no request is stopped in favour of another tenant's. A tenant's counter only stands still
while it gets nothing, and those of others grow, so it is served in time.

Where blocks are short, running requests take them from those ``behind`` them by the same rules: of
one tenant by ``queue_key``, of different ones by the order in which they were admitted. By
``queue_key`` alone, a late request would lose its blocks again and again to all that a flood had
put before it.

A decision takes O(log tenants). With one tenant the order is that of ``queue_key`` alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from octavo.core.request import Request


class Queueable(Protocol):
    """The fields by which a `FairQueue` orders what waits, as of a `Request`.

    ``turn`` is set by the queue.
    """

    turn: int

    @property
    def tenant(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def queue_key(self) -> tuple[int, int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


R = TypeVar("R", bound=Queueable)

_queue_key = attrgetter("queue_key")

# Number of accounts from which on those without debts are dropped.
_FEW_ACCOUNTS = 64


@dataclass(eq=False, slots=True)
class _Account(Generic[R]):
    """One tenant: its waiting requests, and the tokens that it was given while any request waited.

    Args:
        turn: when it was last served, or began to wait, in numbers that only grow.
        num_passed: number of first requests of ``waiting`` that cannot be admitted in the current
            round.
        is_listed: it has an entry in the heap.
    """

    served: float = 0.0
    turn: int = 0
    waiting: list[R] = field(default_factory=list)  # sorted by queue_key
    num_passed: int = 0
    is_listed: bool = False


class FairQueue(Generic[R]):
    """The waiting requests of a scheduler."""

    def __init__(self) -> None:
        self.num_tokens = 0  # known tokens of waiting requests
        self._num_requests = 0
        self._num_turns = 0
        self._accounts: dict[str, _Account[R]] = {}
        # By counter and turn. Both only grow, so an entry is never behind where it belongs: it is
        # put right when it has come to the top.
        self._heap: list[tuple[float, int, _Account[R]]] = []
        self._passed: list[_Account[R]] = []  # those with passed requests
        self._many_accounts = _FEW_ACCOUNTS

    def __len__(self) -> int:
        return self._num_requests

    def add(self, request: R) -> None:
        """Queue a request."""
        account = self._account_of(request)
        if not account.waiting:
            self._end_round()
            first = self._first()
            if first is not None:
                account.served = max(account.served, first.served)
            self._list(account, self._next_turn())
        insort(account.waiting, request, key=_queue_key)
        self._num_requests += 1
        self.num_tokens += len(request.token_ids)

    def remove(self, request: R) -> None:
        """Take a request out of the queue."""
        waiting = self._accounts[request.tenant].waiting
        index = bisect_left(waiting, request.queue_key, key=_queue_key)
        assert waiting[index] is request
        del waiting[index]
        self._num_requests -= 1
        self.num_tokens -= len(request.token_ids)
        if not self._num_requests:  # all are even
            self._accounts.clear()
            self._heap.clear()
            self._passed.clear()

    def admit(self, request: R, num_tokens: int) -> None:
        """Take out a request that now runs, and charge the prompt tokens that will be computed."""
        turn = self._accounts[request.tenant].turn = self._next_turn()
        request.turn = request.turn or turn
        self.remove(request)
        self.charge(request, num_tokens)

    def charge(self, request: R, num_tokens: int) -> None:
        """Charge tokens that a request was given, in whatever state. Without effect while none
        waits."""
        if self._num_requests:
            self._account_of(request).served += num_tokens / request.weight

    def in_order(self) -> Iterator[R]:
        """Yield requests in the order of admission, which takes admissions during the iteration
        into account.

        Between two of them, the last one may be admitted. If it is not, it is passed over. The
        iteration may be left at any point.
        """
        self._end_round()
        while (account := self._first()) is not None:
            waiting, place = account.waiting, account.num_passed
            request = waiting[place]
            yield request
            if place < len(waiting) and waiting[place] is request:
                if not place:
                    self._passed.append(account)
                account.num_passed += 1
            if waiting and account.num_passed == len(waiting):
                heappop(self._heap)  # it is still at the top: no other counter has fallen
                account.is_listed = False

    def _end_round(self) -> None:
        for account in self._passed:
            account.num_passed = 0
            if account.waiting and not account.is_listed:
                self._list(account, account.turn)
        self._passed.clear()

    def _first(self) -> _Account[R] | None:
        """Return the first account that has requests which were not passed over."""
        heap = self._heap
        while heap:
            served, turn, account = heap[0]
            if not account.waiting:
                heappop(heap)
                account.is_listed = False
            elif (served, turn) != (account.served, account.turn):
                heapreplace(heap, (account.served, account.turn, account))
            else:
                return account
        return None

    def _list(self, account: _Account[R], turn: int) -> None:
        account.turn = turn
        if not account.is_listed:
            account.is_listed = True
            heappush(self._heap, (account.served, turn, account))

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def _account_of(self, request: R) -> _Account[R]:
        account = self._accounts.get(request.tenant)
        if account is None:
            if len(self._accounts) >= self._many_accounts:
                self._drop_accounts_without_debts()
            account = self._accounts[request.tenant] = _Account()
        return account

    def _drop_accounts_without_debts(self) -> None:
        """Drop accounts without waiting requests and debts: where addresses are tenants, there is
        no end to them."""
        first = self._first()
        least = 0.0 if first is None else first.served
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account.waiting or account.served > least
        }
        for _, _, account in self._heap:
            account.is_listed = bool(account.waiting)
        self._heap = [entry for entry in self._heap if entry[2].is_listed]
        heapify(self._heap)
        self._many_accounts = max(_FEW_ACCOUNTS, 2 * len(self._accounts))


def behind(request: Request, running: Sequence[Request]) -> list[Request]:
    """Return the running requests whose blocks a request may take.

    A tenant has the turns at which its requests were admitted, and the first of these by
    ``queue_key`` has the first turn. So the first request of all stays first until it ends: a later
    one comes before it only if its own tenant gives it a higher priority.
    """
    if all(other.tenant == request.tenant for other in running):
        return [other for other in running if other.queue_key > request.queue_key]
    turns: dict[Request, int] = {}
    by_tenant: dict[str, list[Request]] = {}
    for other in running:
        by_tenant.setdefault(other.tenant, []).append(other)
    for requests in by_tenant.values():
        in_order = sorted(requests, key=_queue_key)
        turns |= zip(in_order, sorted(other.turn for other in requests), strict=True)
    return [other for other in running if turns[other] > turns[request]]
