"""Past answers that suffix decoding searches, kept apart by tenant and bounded in number."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.speculation.token_index import TokenIndex

# Separates answers. It is no token id, so no context matches it and no draft goes past it.
END = -1


class PastAnswers:
    """Indexed answers by tenant; the oldest of all tenants are dropped first.

    A tenant is a cache salt, "" included; no tenant finds the answers of another.

    Args:
        lengths: lengths of the token runs that are indexed.
        max_answers, max_tokens: limits over all tenants. A token takes a dictionary entry for each
            length whose run is new.
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
        """Remember an answer, unless it is longer than ``max_tokens``."""
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
