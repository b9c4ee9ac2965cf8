"""Rows of all kinds, with logits, to compare samplers by."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from octavo.core.sampling_params import SamplingParams
from octavo.runtime import sampler as oracle
from octavo.runtime.sampler import SamplerOutput, SamplingRow

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 100.0},
    {"temperature": 1e-5},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 5.0, "top_k": 10_000_000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 1 - 1e-12},
    {"temperature": 0.2, "top_k": 770},  # more than there are with any weight
    {"temperature": 1.2, "top_k": 30, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 5, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.5},
    {"temperature": 2.0, "typical_p": 0.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.1},
]


def make_row(position: int = 0, *, seed: int = 0, sample_index: int = 0, **asked) -> SamplingRow:
    """A row, of ``position`` earlier tokens if none are given as ``output``. ``allowed``: the ids
    that its mask allows, of ``vocab_size``."""
    prompt, output = asked.pop("prompt", ()), asked.pop("output", range(position))
    allowed, vocab_size = asked.pop("allowed", None), asked.pop("vocab_size", 0)
    row = SamplingRow(SamplingParams(**asked), seed, sample_index, prompt, output)
    if allowed is not None:
        row.bits = array("I", bytes(4 * -(-vocab_size // 32)))
        for token_id in allowed:
            row.bits[token_id >> 5] |= 1 << (token_id & 31)
    return row


def constrained_rows(vocab_size: int, rng: np.random.Generator) -> list[SamplingRow]:
    """Rows whose logits somebody changes."""
    some = [*rng.integers(0, vocab_size, 40).tolist(), vocab_size, vocab_size + 5]
    few = sorted({*rng.integers(0, vocab_size, 5).tolist(), vocab_size - 1})
    masked = {"allowed": few, "vocab_size": vocab_size}
    return [
        make_row(3, temperature=1.0, **masked),
        make_row(4, temperature=0.0, **masked),
        make_row(5, temperature=1.0, top_p=0.9, seed=7, **masked),
        make_row(temperature=0.0, logit_bias={few[0]: 50.0, vocab_size: 3.0, vocab_size - 1: 50.0}),
        make_row(temperature=1.0, logit_bias={some[1]: 4.0, some[2]: -100.0}, top_k=8),
        make_row(prompt=some, output=some[:9] * 3, temperature=0.8, repetition_penalty=1.7),
        make_row(prompt=some, output=some[:9] * 3, temperature=0.0, repetition_penalty=0.4),
        make_row(prompt=some, output=some[5:8], temperature=1.0, presence_penalty=1.5, top_k=12),
        make_row(output=some[5:] * 2, temperature=1.0, frequency_penalty=-1.3, seed=9),
        make_row(
            prompt=some[20:],
            output=some[:25],
            temperature=0.7,
            repetition_penalty=1.1,
            presence_penalty=-0.7,
            frequency_penalty=0.3,
            logit_bias={some[0]: 2.5, some[30]: -1.0, few[0]: 1.0},
            top_p=0.9,
            logprobs=2,
            **masked,
        ),
        make_row(3, temperature=1.0, seed=11),
    ]


def random_logits(num_rows: int, vocab_size: int, device: str, seed: int = 0) -> torch.Tensor:
    """Logits of which many are -inf, and some the same."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    is_coarse = rng.random(num_rows) < 0.5  # there, whole groups of tokens are as likely
    logits[is_coarse] = np.round(logits[is_coarse])
    logits[:, vocab_size // 2] = -0.5
    return torch.from_numpy(logits).to(device)


def assert_same(found: SamplerOutput, logits: torch.Tensor, rows: list[SamplingRow]) -> None:
    """What the oracle says: tokens and errors the same, log-probabilities within 1e-5."""
    expected = oracle.sample(logits, rows)
    assert found.errors == expected.errors
    for index, (token_id, right) in enumerate(
        zip(found.token_ids, expected.token_ids, strict=True)
    ):
        assert token_id == right or index in found.errors, (index, token_id, right, rows[index])
    for entry, right in zip(found.logprobs, expected.logprobs, strict=True):
        assert (entry is None) == (right is None)
        if entry is not None and right is not None:
            assert (entry.token_id, entry.rank) == (right.token_id, right.rank)
            assert abs(entry.logprob - right.logprob) < 1e-5
            assert [t for t, _ in entry.top] == [t for t, _ in right.top]
            assert all(
                a == b or abs(a - b) < 1e-5
                for (_, a), (_, b) in zip(entry.top, right.top, strict=True)
            )
