"""Which of the waiting requests may join next: fair among tenants, by the tokens that each gets.

Every tenant has a counter of the tokens that it was given, divided by its weight, and the next
place goes to the tenant whose counter is the lowest (the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024). Within a tenant, requests come by priority
and arrival, ``Request.queue_key``; one that was preempted keeps its place there.

Tokens are counted when they are given: those of a prompt that have to be computed, when the request
joins (what the prefix cache has is free); those of an answer, as they come. Deficit round robin
would have to subtract the length of an answer before anybody knows it: a request that may have
8,192 tokens and ends after twenty would pay for all of them, or a quantum would stand for a guess.
What a request computes again after a preemption is not counted: it is not its doing.

Three rules make it fair over time:

- Tokens count only while somebody waits. Who uses what nobody else wants owes nothing for it; and
  when the queue is empty, all are even again.
- Who begins to wait is lifted to the lowest counter of those who wait: whoever asked for nothing
  has saved nothing up. What it owes it keeps.
- Among equals, who was served longest ago comes first.

So between any two tenants that both wait all the time, what they were given since differs by no
more than what is bounded beforehand: a prompt, and what the running requests of one of them bring
until they end, since no request is stopped for the sake of another tenant's. A tenant's counter
only stands still while it gets nothing, and those of others grow, so its turn comes.

Where blocks are short, running requests take them from those ``behind`` them by the same rules: of
one tenant by ``queue_key``, of different ones by the turns in which they joined. By ``queue_key``
alone, who came late would lose its blocks again and again to all that a flood had put before it.

A decision takes O(log tenants). With one tenant the order is that of ``queue_key`` alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter

from octavo.core.request import Request

_queue_key = attrgetter("queue_key")

# Accounts of tenants, before those that owe nothing are looked for.
_FEW_ACCOUNTS = 64


@dataclass(eq=False, slots=True)
class _Account:
    """One tenant: its requests that wait, and what it was given while anybody waited.

    Args:
        turn: when it was last served, or began to wait, in numbers that only grow.
        num_passed: of ``waiting``, the first ones that cannot join in the round under way.
        is_listed: it has an entry in the heap.
    """

    served: float = 0.0
    turn: int = 0
    waiting: list[Request] = field(default_factory=list)  # sorted by queue_key
    num_passed: int = 0
    is_listed: bool = False


class FairQueue:
    """The waiting requests of a scheduler."""

    def __init__(self) -> None:
        self.num_tokens = 0  # that are known of those who wait
        self._num_requests = 0
        self._num_turns = 0
        self._accounts: dict[str, _Account] = {}
        # By counter and turn. Both only grow, so an entry is never behind where it belongs: it is
        # put right when it has come to the top.
        self._heap: list[tuple[float, int, _Account]] = []
        self._passed: list[_Account] = []  # those with passed requests
        self._many_accounts = _FEW_ACCOUNTS

    def __len__(self) -> int:
        return self._num_requests

    def add(self, request: Request) -> None:
        """Have a request wait."""
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

    def remove(self, request: Request) -> None:
        """A request waits no longer."""
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

    def admit(self, request: Request, num_tokens: int) -> None:
        """A request joins those that run, and so many tokens of its prompt will be computed."""
        turn = self._accounts[request.tenant].turn = self._next_turn()
        request.turn = request.turn or turn
        self.remove(request)
        self.charge(request, num_tokens)

    def charge(self, request: Request, num_tokens: int) -> None:
        """A request was given tokens, wherever it is. Without effect while nobody waits."""
        if self._num_requests:
            self._account_of(request).served += num_tokens / request.weight

    def in_order(self) -> Iterator[Request]:
        """A round: requests in the order in which they may join, as it is after those before have.

        Between two of them, the last one may be admitted. If it is not, it is passed over. A round
        may be left at any point.
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
                heappop(self._heap)  # it is still at the top: nobody else was charged less
                account.is_listed = False

    def _end_round(self) -> None:
        for account in self._passed:
            account.num_passed = 0
            if account.waiting and not account.is_listed:
                self._list(account, account.turn)
        self._passed.clear()

    def _first(self) -> _Account | None:
        """Whose turn it is, of those that have not been passed over with all they have."""
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

    def _list(self, account: _Account, turn: int) -> None:
        account.turn = turn
        if not account.is_listed:
            account.is_listed = True
            heappush(self._heap, (account.served, turn, account))

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def _account_of(self, request: Request) -> _Account:
        account = self._accounts.get(request.tenant)
        if account is None:
            if len(self._accounts) >= self._many_accounts:
                self._forget_those_who_owe_nothing()
            account = self._accounts[request.tenant] = _Account()
        return account

    def _forget_those_who_owe_nothing(self) -> None:
        """Where addresses are tenants, there is no end to them."""
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
    """Those of the running requests whose blocks a request may take.

    A tenant has the turns in which its requests joined, and the first of these by ``queue_key`` has
    the first turn. So whoever is first of all stays it until it ends, as nobody who joins later
    comes before it but a request of its own tenant with a higher priority.
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
