"""Functions by which embeddings are compared, as a model's files name them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Similarity = Callable[[np.ndarray, np.ndarray], float]


def similarity_of(name: str) -> Similarity:
    """Return the function of a name of sentence-transformers; more is more alike."""
    return _FUNCTIONS[name]


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    lengths = math.sqrt(float(wide_a @ wide_a) * float(wide_b @ wide_b))
    return float(wide_a @ wide_b) / max(lengths, 1e-24)


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    return float(a.astype(np.float64) @ b.astype(np.float64))


def _euclidean(a: np.ndarray, b: np.ndarray) -> float:
    return -float(np.sqrt(np.square(a.astype(np.float64) - b).sum()))


def _manhattan(a: np.ndarray, b: np.ndarray) -> float:
    return -float(np.abs(a.astype(np.float64) - b).sum())


_FUNCTIONS: dict[str, Similarity] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}
