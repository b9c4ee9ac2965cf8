"""Random numbers that are a function of their coordinates, not of a generator's state.

``uniform(seed, sample_index, position, stream)`` is the number for one token of one sample of one
request. Nothing is drawn in sequence, so batching, preemption and recomputation cannot shift a
request's randomness, and nothing has to be saved to repeat it.

The construction is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011: ten rounds of a 128-bit block function, the 64-bit seed as its key.

    counter   [ position low | position high | sample_index | stream ]     4 x 32 bits
    key       [ seed low | seed high ]                                     2 x 32 bits
    uniform   the top 53 bits of output words 0 and 1, over 2**53
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

# 32 bits in a Python int, a uint64 array [N], or what else computes with 64 bits that wrap round.
Word = TypeVar("Word", int, np.ndarray, Any)

# Uses of random numbers at one position: the token itself is 0.
XTC_STREAM = 1

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Below this many numbers, Python's integers are faster than numpy's hundred small calls.
_SCALAR_BELOW = 32


def philox(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Compute the Philox4x32-10 block function: four 32-bit words from a counter and a key.

    Words are Python ints, uint64 arrays or int64 tensors of equal shape, whose values fit 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> 32 & _MASK) ^ c1 ^ k0, product1 & _MASK
        c2, c3 = (product0 >> 32 & _MASK) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, position: int, stream: int = 0) -> float:
    """Return a number in [0, 1), a multiple of 2**-53, that depends on the arguments alone.

    Args:
        seed: taken modulo 2**64.
        sample_index, stream: in [0, 2**32). Streams serve different uses at one position.
        position: in [0, 2**64); index of the token among the generated ones.
    """
    counter = (position & _MASK, position >> 32, sample_index, stream)
    high, low, _, _ = philox(counter, (seed & _MASK, seed >> 32 & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53


def uniforms(
    seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int], stream: int = 0
) -> np.ndarray:
    """Compute ``uniform`` for N triples at once: float64 [N], the same bits as N calls."""
    if len(seeds) < _SCALAR_BELOW:
        triples = zip(seeds, sample_indices, positions, strict=True)
        return np.array([uniform(*triple, stream) for triple in triples], dtype=np.float64)
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    sample_index = np.array(sample_indices, dtype=np.uint64)
    counter = (position & _MASK, position >> 32, sample_index, np.full_like(position, stream))
    high, low, _, _ = philox(counter, (seed & _MASK, seed >> 32))
    numbers: np.ndarray = ((high << 32 | low) >> 11).astype(np.float64) * 2.0**-53
    return numbers
