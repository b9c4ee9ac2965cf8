"""What is guessed for one request, and how sure that is."""

from __future__ import annotations

from typing import NamedTuple


class Guess(NamedTuple):
    """Tokens that may come next, and the probability of each that it is right if those before it
    are."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]
