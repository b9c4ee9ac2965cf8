"""What a drafting model's own probability of a token says of the chance that it is right.

Some models are too sure of themselves, and others know better than they say: a copy of the target
in fewer bits agrees with it on a token that both hold for one of many, and where tokens are sampled
with the same random number, on one that both think unlikely. So it is counted how often tokens of a
probability were right, greedy and sampled ones apart.
"""

from __future__ import annotations

from bisect import bisect_right

_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
# Before anything is known, a token is believed: what is never tried is never learned. That counts
# as so many tokens; and no more than so many are remembered, as texts change.
_PRIOR = 0.9
_PRIOR_TOKENS = 2.0
_MAX_TOKENS = 400.0


class Confidence:
    """Learns from drafts that were verified."""

    def __init__(self) -> None:
        # By kind and bin of probability: tokens that were verified, and those that were right.
        self._counts = {
            is_greedy: [[0.0, 0.0] for _ in range(len(_BOUNDS) + 1)] for is_greedy in (True, False)
        }

    def chance(self, probability: float, *, is_greedy: bool) -> float:
        """That a token is right if all before it are, between 0 and 1."""
        tried, right = self._counts[is_greedy][bisect_right(_BOUNDS, probability)]
        prior = max(probability, _PRIOR)
        return (right + _PRIOR_TOKENS * prior) / (tried + _PRIOR_TOKENS)

    def learn(self, probability: float, *, is_greedy: bool, is_right: bool) -> None:
        """A token was verified whose predecessors were right."""
        counts = self._counts[is_greedy][bisect_right(_BOUNDS, probability)]
        if counts[0] >= _MAX_TOKENS:
            counts[:] = [counts[0] / 2, counts[1] / 2]
        counts[0] += 1
        counts[1] += is_right
