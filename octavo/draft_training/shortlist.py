"""The shortlist of tokens that a head can draft, since whole vocabularies cost too much."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# Weight of the tokens of the model's answers, beside those of prompts and other text.
_OWN_WEIGHT = 10


def shortlist(own: Iterable[int], other: Iterable[int], size: int, vocab_size: int) -> np.ndarray:
    """The most frequent tokens, ascending: int64 [size], or the whole vocabulary if that is less.

    Args:
        own: tokens of the model's answers.
        other: tokens of any text.
        size: length of the list. Among tokens that never occurred the lowest ids are taken, since
            most vocabularies are in the order of frequency.
    """
    counts = _counts(own, vocab_size) * _OWN_WEIGHT + _counts(other, vocab_size)
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[: min(size, vocab_size)]).astype(np.int64)


def coverage(listed: np.ndarray, token_ids: np.ndarray) -> float:
    """The share of tokens that are in a list: an upper bound of its head's acceptance."""
    return float(np.isin(token_ids, listed).mean()) if len(token_ids) else 0.0


def _counts(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    return np.bincount(np.fromiter(token_ids, np.int64), minlength=vocab_size)
