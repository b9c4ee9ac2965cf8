"""Hadamard matrices and rotations made of them, held against plain matrix products."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from octavo.quantize.hadamard import OrthogonalRotation, hadamard_factors, random_rotation

# 12 and 20 are Paley's of q + 1, 28 and 36 those of 2 (q + 1); 60 is 59 + 1.
ORDERS = [1, 2, 4, 12, 16, 20, 24, 28, 36, 60, 64, 128, 240, 576, 640]


def dense(rotation: OrthogonalRotation) -> np.ndarray:
    return rotation.of_rows(np.eye(len(rotation.signs)))


@pytest.mark.parametrize("order", ORDERS)
def test_entries_are_of_one_size_and_rows_are_orthogonal(order):
    factors = hadamard_factors(order)
    assert factors is not None
    matrix = reduce(np.kron, factors)
    assert matrix.shape == (order, order) and set(np.unique(matrix)) <= {1.0, -1.0}
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))


@pytest.mark.parametrize("order", [3, 6, 10, 18, 52, 100])
def test_orders_that_have_none_or_none_that_is_known_here(order):
    assert hadamard_factors(order) is None


def test_of_models():
    for width in (576, 640, 896, 960, 1152, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 5120):
        factors = hadamard_factors(width)
        assert factors is not None and np.prod([len(factor) for factor in factors]) == width


@pytest.mark.parametrize("width", [16, 24, 52, 576])  # 52: no Hadamard matrix
def test_rotations_are_orthogonal_in_float64(width):
    matrix = dense(random_rotation(2, width, np.random.default_rng(1)))
    assert matrix.dtype == np.float64
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(2 * width), atol=1e-13)
    assert not matrix[:width, width:].any() and not matrix[width:, :width].any()


def test_factors_are_a_kronecker_product():
    rng = np.random.default_rng(2)
    factors = tuple(rng.standard_normal((size, size)) for size in (3, 2, 5))
    signs = rng.choice([-1.0, 1.0], 60)
    matrix = signs[:, None] * np.kron(np.eye(2), reduce(np.kron, factors))
    rows = rng.standard_normal((4, 7, 60))
    np.testing.assert_allclose(
        OrthogonalRotation(signs, factors).of_rows(rows), rows @ matrix, atol=1e-12
    )


def test_a_rotation_spreads_one_value_evenly():
    rotation = random_rotation(1, 48, np.random.default_rng(3))
    np.testing.assert_allclose(np.abs(dense(rotation)), 48**-0.5, rtol=1e-12)


def test_repeated_for_inputs_that_come_several_times():
    rotation = random_rotation(3, 8, np.random.default_rng(4))
    rows = np.random.default_rng(5).standard_normal((6, 3, 8))
    once = rotation.of_rows(rows.reshape(6, 24)).reshape(rows.shape)
    twice = rotation.repeated(8, 2).of_rows(rows.repeat(2, axis=1).reshape(6, 48))
    assert np.array_equal(twice, once.repeat(2, axis=1).reshape(6, 48))
