"""Drafts that grow a token at a time, of several requests at once, as long as they are likely."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.core.batch import Draft
from octavo.core.drafting import Opening
from octavo.speculation.config import SpeculativeConfig

# A further row costs a verification about as much as a tenth or a sixth of a step, so what is
# accepted less often does not pay; heads are surer of themselves than they are right.
MIN_PROBABILITY = 0.25


class Chain:
    """A draft under way, for an opening."""

    def __init__(self, opening: Opening, min_probability: float, max_tokens: int):
        self.opening = opening
        self._most = min(opening.room, max_tokens)
        self.token_ids: list[int] = []
        self._least = math.log(min_probability) if min_probability > 0 else -math.inf
        self._logprob = 0.0

    @property
    def last_token_id(self) -> int:
        """What the next one follows: of the draft, or known."""
        return (self.token_ids or self.opening.request.token_ids)[-1]

    def extend(self, token_id: int, logprob: float) -> bool:
        """Take a token in, and say whether there is to be another. It is left out where the whole
        would be too unlikely."""
        self._logprob += logprob
        if not self._logprob >= self._least:  # nor is a NaN
            return False
        self.token_ids.append(token_id)
        return len(self.token_ids) < self._most


def drafts_of(chains: Sequence[Chain]) -> dict[str, Draft]:
    """Those that have a token, by request."""
    return {
        chain.opening.request.request_id: Draft.chain(chain.token_ids)
        for chain in chains
        if chain.token_ids
    }


def min_probability_of(config: SpeculativeConfig) -> float:
    said = config.min_probability
    return MIN_PROBABILITY if said is None else said
