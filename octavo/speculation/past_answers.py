"""What was answered before, for each tenant apart, as long as there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.speculation.token_index import TokenIndex

# Stands after each answer, and is no token: no context ends with it, and no guess goes beyond.
END = -1


class PastAnswers:
    """Texts by tenant, the oldest forgotten first, whosever they are.

    A tenant is a cache salt; none finds what is another's, and "" is a tenant like any other.

    Args:
        lengths: of the runs that are indexed.
        max_answers, max_tokens: that are remembered, of all tenants together. Each token is an
            entry of a dictionary for each length, if its run is not there yet.
    """

    def __init__(self, lengths: Sequence[int], max_answers: int, max_tokens: int):
        self._lengths = tuple(lengths)
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._texts: dict[str, list[int]] = {}
        self._indexes: dict[str, TokenIndex] = {}
        self._order: deque[tuple[str, int]] = deque()  # the tenant and the tokens of each answer
        self.num_tokens = 0

    @property
    def num_answers(self) -> int:
        return len(self._order)

    @property
    def num_tenants(self) -> int:
        return len(self._indexes)

    def of(self, tenant: str) -> TokenIndex | None:
        """The index of a tenant's answers; None if there are none."""
        return self._indexes.get(tenant)

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Remember an answer. One that is longer than all there is room for is not kept."""
        count = len(token_ids) + 1
        if count > self._max_tokens or self._max_answers == 0:
            return
        while self.num_answers >= self._max_answers or self.num_tokens + count > self._max_tokens:
            self._drop_oldest()
        if tenant not in self._indexes:
            self._texts[tenant] = []
            self._indexes[tenant] = TokenIndex(self._lengths, self._texts[tenant])
        self._texts[tenant] += [*token_ids, END]
        self._indexes[tenant].catch_up()
        self._order.append((tenant, count))
        self.num_tokens += count

    def _drop_oldest(self) -> None:
        tenant, count = self._order.popleft()
        self.num_tokens -= count
        index = self._indexes[tenant]
        index.drop(count)
        if index.begin == index.end:
            del self._indexes[tenant], self._texts[tenant]
