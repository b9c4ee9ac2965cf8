"""Whether reading blocks is sooner done than computing them again."""

from __future__ import annotations

from octavo.cost.first_token import StepRates, num_pairs


class SoonerRead:
    """A ``RestoreRule`` by what steps are foreseen to take: each token of a prompt, and each that
    it sees."""

    def __init__(self, rates: StepRates):
        self._rates = rates

    def is_worth(self, start: int, num_tokens: int, seconds: float) -> bool:
        pairs = num_pairs(start + num_tokens) - num_pairs(start)
        computing = num_tokens * self._rates.prompt_token + pairs * self._rates.prompt_pair
        return seconds < computing
