"""The counter-based generator: published answers, and statistics between neighbouring counters."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from octavo.runtime.random import philox, uniform, uniforms

N = 100_000
ALPHA = 1e-5  # per check; with about a dozen checks 1e-4 together, and the numbers are fixed

# Known answers of philox4x32-10, from the file kat_vectors of the authors' Random123 library.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, expected):
    assert philox(counter, key) == expected
    as_arrays = philox(
        tuple(np.array([word], dtype=np.uint64) for word in counter),
        tuple(np.array([word], dtype=np.uint64) for word in key),
    )
    assert tuple(int(word[0]) for word in as_arrays) == expected


def test_uniform_is_the_top_53_bits_of_the_first_two_words():
    assert uniform(0, 0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    seed = 0x299F31D0_A4093822
    position = 0x85A308D3_243F6A88
    words = uniform(seed, 0x13198A2E, position, stream=0x03707344)
    assert words == (0xD16CFE0994FDCCEB >> 11) / 2**53


@pytest.mark.parametrize("num", [0, 1, 5, 31, 32, 33, 1000])
def test_vector_and_scalar_forms_agree_bitwise(num):
    generator = np.random.default_rng(num)
    seeds = [int(s) for s in generator.integers(0, 2**64, num, dtype=np.uint64)]
    samples = [int(s) for s in generator.integers(0, 2**32, num)]
    positions = [int(p) for p in generator.integers(0, 2**40, num)]
    expected = [uniform(*c, stream=3) for c in zip(seeds, samples, positions, strict=True)]
    numbers = uniforms(seeds, samples, positions, stream=3)
    assert numbers.dtype == np.float64
    assert numbers.tolist() == expected


def test_seeds_are_taken_modulo_two_to_the_64():
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    assert uniforms([-1] * 40, [0] * 40, range(40)).tolist() == [
        uniform(2**64 - 1, 0, p) for p in range(40)
    ]


def test_every_coordinate_matters():
    numbers = {
        uniform(seed, sample, position, stream)
        for seed in (0, 1, 2**32, 2**63)
        for sample in (0, 1, 2)
        for position in (0, 1, 2**32)
        for stream in (0, 1)
    }
    assert len(numbers) == 4 * 3 * 3 * 2


def _walk(coordinate: str) -> np.ndarray:
    """N numbers along one coordinate, the others fixed."""
    walk = {"seed": [7] * N, "sample": [3] * N, "position": [11] * N, coordinate: range(N)}
    return uniforms(list(walk["seed"]), walk["sample"], walk["position"])


@pytest.mark.parametrize("coordinate", ["seed", "sample", "position"])
def test_numbers_along_a_coordinate_are_uniform(coordinate):
    numbers = _walk(coordinate)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert stats.kstest(numbers, "uniform").pvalue > ALPHA
    cells = np.bincount((numbers * 1000).astype(int), minlength=1000)
    assert stats.chisquare(cells).pvalue > ALPHA
    low_bits = (numbers * 2.0**53).astype(np.uint64) & np.uint64(0xFF)
    assert stats.chisquare(np.bincount(low_bits.astype(int), minlength=256)).pvalue > ALPHA


@pytest.mark.parametrize("coordinate", ["seed", "sample", "position"])
def test_neighbours_along_a_coordinate_are_independent(coordinate):
    numbers = _walk(coordinate)
    cells = (numbers * 16).astype(int)
    for lag in (1, 2, 64):
        pairs = np.bincount(cells[:-lag] * 16 + cells[lag:], minlength=256)
        assert stats.chisquare(pairs).pvalue > ALPHA
        correlation = np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]
        assert abs(correlation) * np.sqrt(N) < 4.5


def test_small_seeds_give_unrelated_sequences():
    walks = np.stack([uniforms([seed] * 2000, [0] * 2000, range(2000)) for seed in range(20)])
    correlations = np.corrcoef(walks)[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() * np.sqrt(2000) < 5.0


def test_position_of_one_sample_is_not_that_of_the_next():
    # A generator that adds its coordinates would repeat itself along this diagonal.
    by_position = uniforms([5] * 1000, [0] * 1000, range(1000))
    by_sample = uniforms([5] * 1000, range(1000), [0] * 1000)
    assert len(np.intersect1d(by_position[1:], by_sample[1:])) == 0
