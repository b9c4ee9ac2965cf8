"""Orthogonal matrices that spread values evenly, Hadamard matrices with random signs.

A Hadamard matrix has entries of 1 and -1 and orthogonal rows, so divided by the root of its order
it is a rotation, or a reflection, that gives each output the same share of each input. There are
some of every power of two (Sylvester), of q + 1 for primes q = 3 (mod 4) and of 2 (q + 1) for those
with q = 1 (Paley); a Kronecker product of two is one again. So there is one of almost every width
that models have::

    576 = 12 · 12 · 4        2048 = 64 · 32        896 = 28 · 32        2560 = 20 · 64 · 2

A product is kept as its factors, and costs their orders for each value, not the product's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

_LARGEST_EXPONENT = 6  # of a power of two that is one factor


@dataclass(frozen=True, slots=True, eq=False)
class OrthogonalRotation:
    """R = diag(``signs``) (I ⊗ F1 ⊗ F2 ⊗ ...), an orthogonal matrix of n rows.

    ``signs``: float64 [n], of 1 and -1. ``factors``: orthogonal, float64 [f, f]; the product of
    their orders divides n, and R has equal blocks of so many values but for their signs.
    """

    signs: np.ndarray
    factors: tuple[np.ndarray, ...]

    def of_rows(self, values: np.ndarray) -> np.ndarray:
        """Multiply each row x of ``values`` [..., n] to x R: float64 [..., n]."""
        width = math.prod(len(factor) for factor in self.factors)
        rotated = (values * self.signs).reshape(-1, width)
        for factor in self.factors:
            # An index of a block has a digit for each factor. The first digit is multiplied, and
            # becomes the last, so that they are in order again after the last factor.
            digits = rotated.reshape(len(rotated), len(factor), -1).swapaxes(1, 2)
            rotated = (digits @ factor).reshape(len(rotated), width)
        return rotated.reshape(values.shape)

    def repeated(self, width: int, times: int) -> OrthogonalRotation:
        """The rotation of an input in which each block of ``width`` values of this one's occurs
        ``times`` times in a row."""
        return replace(self, signs=self.signs.reshape(-1, width).repeat(times, axis=0).reshape(-1))


def random_rotation(num_blocks: int, width: int, rng: np.random.Generator) -> OrthogonalRotation:
    """Draw a rotation of ``num_blocks`` blocks of ``width`` values: a Hadamard matrix with random
    signs if one of that order is known here, else a random orthogonal matrix."""
    signs = rng.choice([-1.0, 1.0], num_blocks * width)
    factors = hadamard_factors(width)
    if factors is None:
        return OrthogonalRotation(signs, (random_orthogonal(width, rng),))
    return OrthogonalRotation(signs, tuple(factor / math.sqrt(len(factor)) for factor in factors))


def random_orthogonal(size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw an orthogonal matrix uniformly, float64 (Mezzadri 2007, arXiv math-ph/0609050)."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return q * np.sign(np.diag(r))


def hadamard_factors(order: int) -> list[np.ndarray] | None:
    """Matrices of 1 and -1 (float64) whose Kronecker product is a Hadamard matrix; None if no
    product of Sylvester's and Paley's matrices has this order."""
    if _is_power_of_two(order):
        largest, rest = divmod(order.bit_length() - 1, _LARGEST_EXPONENT)
        exponents = [_LARGEST_EXPONENT] * largest + [rest] * (rest > 0 or largest == 0)
        return [_sylvester(exponent) for exponent in exponents]
    for divisor in range(12, order + 1, 4):
        if order % divisor or _is_power_of_two(divisor):
            continue
        factor = _paley(divisor)
        others = None if factor is None else hadamard_factors(order // divisor)
        if factor is not None and others is not None:
            return [factor, *others]
    return None


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _sylvester(exponent: int) -> np.ndarray:
    """Sylvester's matrix of order 2 ** exponent."""
    matrix = np.ones((1, 1))
    for _ in range(exponent):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _paley(order: int) -> np.ndarray | None:
    """Paley's matrix of an order that is a multiple of 4; None if there is no prime for it."""
    if _is_prime(order - 1):
        return np.eye(order) + _bordered_residues(order - 1, -1.0)
    half = order // 2
    if half % 4 == 2 and _is_prime(half - 1):
        symmetric = np.kron(_bordered_residues(half - 1, 1.0), [[1.0, 1.0], [1.0, -1.0]])
        return symmetric + np.kron(np.eye(half), [[1.0, -1.0], [-1.0, -1.0]])
    return None


def _bordered_residues(q: int, left: float) -> np.ndarray:
    """The matrix [0 1; left Q]: Q[i, j] is 1 if j - i is a square modulo q, else -1, and 0 on the
    diagonal."""
    squares = np.unique(np.arange(1, q) ** 2 % q)
    character = np.full(q, -1.0)
    character[squares], character[0] = 1.0, 0.0
    index = np.arange(q)
    matrix = np.ones((q + 1, q + 1))
    matrix[1:, 0], matrix[0, 0] = left, 0.0
    matrix[1:, 1:] = character[(index - index[:, None]) % q]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % i for i in range(2, math.isqrt(number) + 1))
