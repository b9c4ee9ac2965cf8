"""The tokens that a head may guess: a head over a whole vocabulary would cost more than its guesses
are worth.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# What the model says itself counts more than what it was asked and other text.
_OWN_WEIGHT = 10


def shortlist(own: Iterable[int], other: Iterable[int], size: int, vocab_size: int) -> np.ndarray:
    """The tokens that come most often, int64 [size or fewer], ascending.

    Args:
        own: tokens of the model's answers. other: of any text.
        size: of the list; the whole vocabulary if that is no larger. Of tokens that never came,
            those with the lowest ids are taken, which most vocabularies have in the order of their
            frequency.
    """
    counts = _counts(own, vocab_size) * _OWN_WEIGHT + _counts(other, vocab_size)
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[: min(size, vocab_size)]).astype(np.int64)


def coverage(listed: np.ndarray, token_ids: np.ndarray) -> float:
    """Which part of some tokens is in a list: the most that its head can be right."""
    return float(np.isin(token_ids, listed).mean()) if len(token_ids) else 0.0


def _counts(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    return np.bincount(np.fromiter(token_ids, np.int64), minlength=vocab_size)
