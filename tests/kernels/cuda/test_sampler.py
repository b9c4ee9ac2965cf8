"""The tokens of the sampling kernels are those of ``runtime/sampler.py``."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from triton_tools import ARCHS, launches

from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cuda.sampler import Chunks, sample
from octavo.runtime import sampler
from octavo.runtime.cuda_sampling import can_sample, row_params
from octavo.runtime.sampler import SamplingRow

INF = math.inf


def make_row(position=0, *, seed=0, sample_index=0, **settings) -> SamplingRow:
    # Nothing reads the tokens of an output, only how many they are.
    return SamplingRow(SamplingParams(**settings), seed, sample_index, (), range(position))


def tokens_of(logits, rows):
    """Token ids and the greatest logits of all rows."""
    num_rows, vocab_size = logits.shape
    chunks = Chunks.allocate(num_rows, vocab_size, logits.device)
    token_ids = torch.full((num_rows,), -1, dtype=torch.int32, device=logits.device)
    peaks = torch.full((num_rows,), torch.nan, device=logits.device)
    sample(logits, row_params(rows, logits.device), chunks, token_ids, peaks)
    return token_ids.tolist(), peaks.tolist()


def random_logits(num_rows, vocab_size, device, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -INF
    return torch.from_numpy(logits).to(device)


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1e-5},
    {"temperature": 100.0},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_oracles_tokens(device, settings):
    """Two thousand draws in all, of seeds and positions of all sizes."""
    rng = np.random.default_rng(1)
    num_rows = 300 if settings["temperature"] else 30
    logits = random_logits(num_rows, 777, device)
    rows = [
        make_row(
            position=2 ** (i % 40) + i if i % 2 else i,
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            sample_index=i % 7,
            **settings,
        )
        for i in range(num_rows)
    ]
    token_ids, peaks = tokens_of(logits, rows)
    assert token_ids == sampler.sample(logits, rows).token_ids
    assert peaks == logits.amax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 2048, 2049, 5003, 20_001])
def test_vocabularies_of_any_size(device, vocab_size):
    logits = random_logits(8, vocab_size, device)
    logits[:, 0] = -2.0
    rows = [make_row(i, temperature=i / 4, min_p=0.01 * (i % 3)) for i in range(8)]
    assert tokens_of(logits, rows)[0] == sampler.sample(logits, rows).token_ids


def test_the_lowest_of_equals(device):
    logits = torch.full((4, 4500), -1.0, device=device)
    logits[0, [4400, 2100, 4499]] = 3.0
    logits[1, [3, 4400]] = torch.tensor([-0.0, 0.0], device=device)
    logits[2] = -7.0
    logits[3, :4499] = -INF
    rows = [make_row(temperature=0)] * 4
    assert tokens_of(logits, rows)[0] == [2100, 3, 0, 4499]


def test_rows_without_a_token(device):
    logits = random_logits(6, 3000, device)
    logits[1, 2500] = torch.nan
    logits[2, [7, 2500]] = torch.tensor([torch.nan, INF], device=device)
    logits[3] = -INF
    logits[4, 2999] = INF
    rows = [make_row(temperature=i % 2) for i in range(6)]
    token_ids, peaks = tokens_of(logits, rows)
    assert token_ids[1:5] == [0, 0, 0, 0]
    assert math.isnan(peaks[1]) and math.isnan(peaks[2]) and peaks[3:5] == [-INF, INF]
    output = sampler.sample(logits, rows)
    assert list(output.errors) == [1, 2, 3, 4]
    assert [token_ids[0], token_ids[5]] == [output.token_ids[0], output.token_ids[5]]


def test_rows_that_only_fill_up(device):
    """There may be room for more rows than are sampled, and rows may be apart."""
    wide = random_logits(3, 1000, device)
    logits, rows = wide[:2, :900], [make_row(temperature=1)] * 3
    chunks = Chunks.allocate(5, 900, device)
    token_ids = torch.full((3,), -1, dtype=torch.int32, device=device)
    sample(logits, row_params(rows, device), chunks, token_ids, torch.empty(3, device=device))
    assert token_ids.tolist() == [*sampler.sample(logits.contiguous(), rows[:2]).token_ids, -1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"min_p": 0.1, "logit_bias": {1: 2.0}, "presence_penalty": 1.0}, True),
        ({"top_k": 5}, False),
        ({"top_p": 0.9}, False),
        ({"typical_p": 0.9}, False),
        ({"top_k": 5, "temperature": 0.0}, True),
    ],
)
def test_what_is_left_to_others(settings, expected):
    assert can_sample(SamplingParams(**settings)) == expected


@pytest.mark.parametrize("arch", ARCHS)
def test_compiled(arch):
    logits, rows = torch.empty(4, 128_256), [make_row(temperature=1)] * 4
    made = [launch.compiled(arch) for launch in launches(lambda: tokens_of(logits, rows))]
    assert len(made) == 3
    for each in made:
        assert each.spills == 0 and each.registers <= 64 and each.shared <= 1 << 10
        assert "ld.global.v4" in each.ptx  # 16 bytes at a time
