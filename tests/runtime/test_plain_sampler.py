"""The sampler without kernels gives the tokens of ``runtime/sampler.py``."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from device_sampling import sample_on_device
from sampling_cases import SETTINGS, assert_same, constrained_rows, make_row, random_logits

from octavo.runtime.plain_sampler import PlainSampler

SAMPLER = PlainSampler()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_oracles_tokens(settings):
    seeds = np.random.default_rng(1).integers(0, 2**64, 60, dtype=np.uint64).tolist()
    rows = [
        make_row(i * 7, seed=seed, sample_index=i % 5, **settings) for i, seed in enumerate(seeds)
    ]
    logits = random_logits(60, 777, "cpu")
    assert_same(sample_on_device(SAMPLER, logits, rows), logits, rows)


def test_rows_that_ask_for_different_things():
    rows = [make_row(i, seed=i, **SETTINGS[i % len(SETTINGS)]) for i in range(2 * len(SETTINGS))]
    logits = random_logits(len(rows), 1000, "cpu", seed=3)
    assert_same(sample_on_device(SAMPLER, logits, rows), logits, rows)


@pytest.mark.parametrize("seed", range(5))
def test_masks_biases_and_penalties(seed):
    rows = constrained_rows(333, np.random.default_rng(seed))
    logits = random_logits(len(rows), 333, "cpu", seed)
    assert_same(sample_on_device(SAMPLER, logits, rows), logits, rows)


@pytest.mark.parametrize("vocab_size", [3, 1000])
def test_logprobs(vocab_size):
    rows = [make_row(i, temperature=i % 2, logprobs=n) for i, n in enumerate([0, 5, None, 20])]
    logits = random_logits(4, vocab_size, "cpu", seed=5)
    assert_same(sample_on_device(SAMPLER, logits, rows), logits, rows)


def test_rows_without_a_token():
    logits = random_logits(8, 300, "cpu")
    logits[1, 250] = torch.nan
    logits[2, [7, 250]] = torch.tensor([torch.nan, math.inf])
    logits[3] = -math.inf
    logits[4, 299] = math.inf
    logits[5, :] = 3e38
    rows = [make_row(temperature=i % 2, logprobs=1, top_k=i % 3) for i in range(5)]
    rows.append(make_row(temperature=1.0, output=[4, 4], repetition_penalty=1e-3))
    rows.append(make_row(temperature=1.0, allowed=(), vocab_size=300))
    logits[7, 0] = torch.nan
    rows.append(make_row(temperature=1.0, allowed=(1, 2), vocab_size=300))
    found = sample_on_device(SAMPLER, logits, rows)
    assert list(found.errors) == [1, 2, 3, 4, 5, 6, 7]
    assert_same(found, logits, rows)


def test_placeholders_become_the_last_tokens():
    token_ids = torch.tensor([5, -1, 0, -3, -2], dtype=torch.int32)
    SAMPLER.resolve(token_ids, torch.tensor([70, 71, 72, 0], dtype=torch.int32))
    assert token_ids.tolist() == [5, 70, 0, 72, 71]
