"""How often what followed a run of tokens before follows it again, by the run's length."""

from __future__ import annotations

# Runs of this length and more are alike.
LONGEST = 32
# What is expected of a run counts as so many observations, and observations are worth half as
# much once there are so many: what is asked changes.
WEIGHT = 8.0
MOST_OBSERVATIONS = 512.0


class MatchRates:
    """Rates at which guesses were right, for runs of each length that they were found by.

    A guess at several tokens is one guess for each: when its first i tokens are right, the run
    that matches is longer by i, and a search from there would find the same place. So there is no
    rate for each position in a guess, and what is learned of one position serves the others.

    Args:
        general: rates of all requests: what is expected where these have seen little, and what
            learns from whatever these learn.
    """

    def __init__(self, general: MatchRates | None = None):
        self._general = general
        self._right = [0.0] * (LONGEST + 1)
        self._tried = [0.0] * (LONGEST + 1)

    def rate(self, length: int) -> float:
        """The estimated probability that a guess from a run of ``length`` tokens is right."""
        length = min(length, LONGEST)
        # Before anything is known: longer runs are better, and none is certain.
        expected = length / (length + 1.5) if self._general is None else self._general.rate(length)
        return (self._right[length] + WEIGHT * expected) / (self._tried[length] + WEIGHT)

    def count(self, length: int, is_right: bool) -> None:
        """A guess from a run of ``length`` tokens was right, or not."""
        place = min(length, LONGEST)
        self._right[place] += is_right
        self._tried[place] += 1
        if self._tried[place] >= MOST_OBSERVATIONS:
            self._right[place] /= 2
            self._tried[place] /= 2
        if self._general is not None:
            self._general.count(length, is_right)
