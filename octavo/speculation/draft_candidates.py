"""A draft candidate, the tokens that a proposer expects next with a probability for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from octavo.core.batch import Draft


class DraftCandidate(NamedTuple):
    """A chain of one or more tokens that may follow the known ones of a request.

    ``probabilities`` are estimates that each token is accepted, given that those before it are.
    """

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]

    def first(self, count: int) -> DraftCandidate:
        """The first ``count`` tokens, at least one."""
        if count >= len(self.token_ids):
            return self
        return DraftCandidate(self.token_ids[:count], self.probabilities[:count])

    def products(self) -> Iterator[float]:
        """Yield for each token the probability that it and all before it are accepted."""
        product = 1.0
        for probability in self.probabilities:
            product *= probability
            yield product

    @property
    def expected_tokens(self) -> float:
        """Expected number of accepted tokens if all are drafted."""
        product, expected = 1.0, 0.0
        for probability in self.probabilities:
            product *= probability
            expected += product
        return expected

    def while_likely(self, least: float) -> DraftCandidate | None:
        """The tokens whose product of probabilities is at least ``least``; None if none is."""
        count = sum(product >= least for product in self.products())
        return self.first(count) if count else None

    def draft(self) -> Draft:
        """The draft that is verified."""
        return Draft.chain(self.token_ids)
