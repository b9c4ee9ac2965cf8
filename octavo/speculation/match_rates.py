"""Acceptance rates of drafts found by matching earlier text, by the length of the match."""

from __future__ import annotations

# Matches of this length and more share a rate.
LONGEST = 32
# The prior weighs so many observations; counts are halved once there are MOST_OBSERVATIONS, so that
# rates follow a change of text.
WEIGHT = 8.0
MOST_OBSERVATIONS = 512.0


class MatchRates:
    """Acceptance rates of draft tokens, by the length of the match that they were found by.

    When the first i tokens of a candidate are accepted, the match is longer by i, and a search from
    there would find the same place. So no rate is kept for each position of a candidate: token i of
    a match of length n has the rate of n + i.

    Args:
        general: rates of all requests, which are the prior of these, and learn what these learn.
    """

    def __init__(self, general: MatchRates | None = None):
        self._general = general
        self._right = [0.0] * (LONGEST + 1)
        self._tried = [0.0] * (LONGEST + 1)

    def rate(self, length: int) -> float:
        """The estimated probability that the token after a match of ``length`` tokens is right."""
        length = min(length, LONGEST)
        # The prior of all requests: longer matches are better, and none is certain.
        expected = length / (length + 1.5) if self._general is None else self._general.rate(length)
        return (self._right[length] + WEIGHT * expected) / (self._tried[length] + WEIGHT)

    def count(self, length: int, is_right: bool) -> None:
        """Count whether the token drafted after a match of ``length`` tokens was right."""
        place = min(length, LONGEST)
        self._right[place] += is_right
        self._tried[place] += 1
        if self._tried[place] >= MOST_OBSERVATIONS:
            self._right[place] /= 2
            self._tried[place] /= 2
        if self._general is not None:
            self._general.count(length, is_right)
