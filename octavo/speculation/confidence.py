"""Calibrates a draft model's probabilities by how often such tokens are accepted.

Some draft models are overconfident, others underconfident: a copy of the target in fewer bits
agrees with it on tokens to which both give a low probability, since both sample with the same
random numbers. So accepted tokens are counted by their probability, apart for greedy and sampled
requests.
"""

from __future__ import annotations

from bisect import bisect_right

_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
# Before any token was verified a high acceptance is assumed, since rates of tokens that are never
# drafted are never learned. That prior weighs _PRIOR_TOKENS tokens. Counts are halved at
# _MAX_TOKENS, so that they follow a change of text.
_PRIOR = 0.9
_PRIOR_TOKENS = 2.0
_MAX_TOKENS = 400.0


class Confidence:
    """Acceptance rates by the draft model's probability, learned from verified drafts."""

    def __init__(self) -> None:
        # By sampling and bin of probability: tokens that were verified, and accepted ones.
        self._counts = {
            is_greedy: [[0.0, 0.0] for _ in range(len(_BOUNDS) + 1)] for is_greedy in (True, False)
        }

    def chance(self, probability: float, *, is_greedy: bool) -> float:
        """The chance, from 0 to 1, that a token is accepted if all before it are."""
        tried, right = self._counts[is_greedy][bisect_right(_BOUNDS, probability)]
        prior = max(probability, _PRIOR)
        return (right + _PRIOR_TOKENS * prior) / (tried + _PRIOR_TOKENS)

    def learn(self, probability: float, *, is_greedy: bool, is_right: bool) -> None:
        """Count a verified token whose predecessors were accepted."""
        counts = self._counts[is_greedy][bisect_right(_BOUNDS, probability)]
        if counts[0] >= _MAX_TOKENS:
            counts[:] = [counts[0] / 2, counts[1] / 2]
        counts[0] += 1
        counts[1] += is_right
