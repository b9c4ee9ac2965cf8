"""The tokens of the sampling kernels are those of ``runtime/sampler.py``."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from device_sampling import described, sample_on_device, upload
from sampling_cases import SETTINGS, assert_same, constrained_rows, make_row, random_logits
from triton_tools import EACH_ARCH, launches

from octavo.kernels.cuda.sampler import TritonSampler
from octavo.kernels.cuda.sampling import SampledTokens
from octavo.runtime.plain_sampler import PlainSampler

INF = math.inf


def sampled(logits, rows):
    num_rows, vocab_size = logits.shape
    return sample_on_device(TritonSampler(num_rows + 1, vocab_size, logits.device), logits, rows)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_oracles_tokens(device, settings):
    """Of seeds and positions of all sizes."""
    is_cut = not settings.keys().isdisjoint({"top_k", "top_p", "typical_p"})
    num_rows = 1000 if device == "cuda" else 3 if is_cut else 20
    seeds = np.random.default_rng(1).integers(0, 2**64, num_rows, dtype=np.uint64).tolist()
    rows = [
        make_row(2 ** (i % 30) + i if i % 2 else i, seed=seed, sample_index=i % 7, **settings)
        for i, seed in enumerate(seeds)
    ]
    logits = random_logits(num_rows, 777, device)
    assert_same(sampled(logits, rows), logits, rows)


# For each of the ways by which a row gets its token.
WAYS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 5.0, "top_k": 10_000_000},
    {"temperature": 2.0, "typical_p": 0.2, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("vocab_size", [1, 2, 2048, 5003])
def test_vocabularies_of_any_size(device, vocab_size):
    asked = SETTINGS if device == "cuda" else WAYS
    logits = random_logits(len(asked), vocab_size, device, seed=vocab_size)
    rows = [make_row(i, seed=i, **settings) for i, settings in enumerate(asked)]
    assert_same(sampled(logits, rows), logits, rows)


def test_cuts_between_equals(device):
    """Of which the first ones stay. Rows of equal logits, or of two groups of them."""
    logits = torch.full((6, 3000), -1.0, device=device)
    logits[2:, 1::2] = torch.tensor(0.0)
    logits[2:, 3::4] = torch.tensor(-0.0)
    asked = [{"top_k": 7}, {"top_p": 0.37}, {"top_k": 1600}, {"top_p": 0.75}, {"typical_p": 0.3}]
    rows = [make_row(i, seed=i, temperature=1.0, **each) for i, each in enumerate(asked)]
    rows.append(make_row(seed=4, temperature=1.0, top_k=1, typical_p=0.1))
    assert_same(sampled(logits, rows), logits, rows)


def test_the_lowest_of_equals(device):
    logits = torch.full((4, 4500), -1.0, device=device)
    logits[0, [4400, 2100, 4499]] = 3.0
    logits[1, [3, 4400]] = torch.tensor([-0.0, 0.0], device=device)
    logits[2] = -7.0
    logits[3, :4499] = -INF
    rows = [make_row(temperature=0)] * 4
    assert sampled(logits, rows).token_ids == [2100, 3, 0, 4499]


def test_masks_biases_and_penalties(device):
    rows = constrained_rows(333, np.random.default_rng(0))
    logits = random_logits(len(rows), 333, device)
    assert_same(sampled(logits, rows), logits, rows)
    rows = [make_row(temperature=1.0, logit_bias={333: 1.0})]  # which there is not
    assert_same(sampled(logits[:1], rows), logits[:1], rows)


def test_more_edits_than_a_program_makes_at_a_time(device):
    output = np.random.default_rng(0).integers(0, 3000, 1500).tolist()
    asked = {"presence_penalty": 1.5, "repetition_penalty": 1.3, "temperature": 1.0}
    rows = [make_row(), make_row(prompt=range(0, 3000, 5), output=output, **asked), make_row(3)]
    logits = random_logits(3, 3000, device)
    assert_same(sampled(logits, rows), logits, rows)


@pytest.mark.parametrize("vocab_size", [3, 5000])
def test_logprobs(device, vocab_size):
    """The last row is that of a token which somebody has made likelier."""
    rows = [make_row(i, temperature=i % 2, logprobs=n) for i, n in enumerate([0, 5, None, 20])]
    bias = {vocab_size - 1: 100.0}
    rows.append(make_row(temperature=1.0, logprobs=3, logit_bias=bias, top_k=2))
    logits = random_logits(5, vocab_size, device, seed=5)
    logits[4, vocab_size - 1] = -20.0
    logits[:4, 1:3] = torch.tensor([0.0, -0.0], device=device)
    assert_same(sampled(logits, rows), logits, rows)


def test_rows_without_a_token(device):
    logits = random_logits(9, 3000, device)
    logits[1, 2500] = torch.nan
    logits[2, [7, 2500]] = torch.tensor([torch.nan, INF], device=device)
    logits[3] = -INF
    logits[4, 2999] = INF
    logits[5, :] = 3e38
    logits[7, 0] = torch.nan
    rows = [make_row(temperature=i % 2, logprobs=1, top_k=i % 3) for i in range(5)]
    rows.append(make_row(temperature=1.0, output=[4, 4], repetition_penalty=1e-3))
    rows.append(make_row(temperature=1.0, allowed=(), vocab_size=3000))
    rows.append(make_row(temperature=1.0, top_k=1, allowed=(1, 2), vocab_size=3000))
    rows.append(make_row(temperature=1.0, typical_p=0.5))
    with np.errstate(all="ignore"):  # what the interpreter would warn of
        found = sampled(logits, rows)
    assert list(found.errors) == [1, 2, 3, 4, 5, 6, 7]
    assert all(found.token_ids[i] == 0 for i in found.errors)
    assert_same(found, logits, rows)


def test_rows_that_only_fill_up(device):
    """There may be room for more rows than are sampled, and rows may be apart."""
    wide = random_logits(3, 1000, device)
    logits, rows = wide[:2, :900], [make_row(temperature=1.0, top_k=3), make_row(temperature=0.5)]
    arrays, asked = described(rows, 900)
    tensors = upload(arrays, device, 2)
    out = SampledTokens.allocate(len(arrays.records), device)
    out.answers.fill_(-5)
    TritonSampler(3, 900, device).sample(logits, tensors, asked, out)
    assert torch.equal(tensors.last_tokens[:2], out.token_ids[:2])
    assert (out.answers[:, 2:] == -5).all() and (tensors.last_tokens[2:] == -7).all()
    contiguous = logits.contiguous()
    twin = SampledTokens.allocate(len(arrays.records), device)
    PlainSampler().sample(contiguous, tensors, asked, twin)
    assert torch.equal(twin.answers[:, :2], out.answers[:, :2])


def test_padding_is_harmless(device):
    """Records of nothing but zeros, and whatever is where logits should be."""
    logits = random_logits(4, 700, device)
    logits[2, ::3], logits[3] = torch.nan, -INF
    rows = [make_row(temperature=1.0, top_p=0.5), make_row(2, temperature=1.0, logprobs=2)]
    arrays, asked = described(rows, 700)
    tensors, out = upload(arrays, device, 2), SampledTokens.allocate(4, device)
    tensors.records[2:] = 0
    TritonSampler(4, 700, device).sample(logits, tensors, asked, out)
    assert out.token_ids[:2].tolist() == sampled(logits[:2], rows).token_ids
    assert out.status.tolist() == [0, 0, 1, 1] and (tensors.last_tokens[2:4] == -7).all()


def test_placeholders_become_the_last_tokens(device):
    token_ids = torch.arange(-150, 150, dtype=torch.int32, device=device)
    twin = token_ids.clone()
    last_tokens = torch.arange(1000, 1151, dtype=torch.int32, device=device)
    TritonSampler(1, 4, device).resolve(token_ids, last_tokens)
    PlainSampler().resolve(twin, last_tokens)
    assert torch.equal(token_ids, twin) and token_ids[[0, 149, 150]].tolist() == [1149, 1000, 0]


ALL_KERNELS = {
    *("_find_peaks", "_sum_weights", "_pick", "_change", "_put_back"),
    *("_mark", "_list", "_keep_typical", "_pick_cut", "_logprobs_of_chunk", "_logprobs_of_row"),
}


@pytest.mark.parametrize("arch", EACH_ARCH)
def test_compiled(arch):
    rows = [
        make_row(temperature=1.0, typical_p=0.5, top_k=5, top_p=0.9, logprobs=5),
        make_row(output=[3], presence_penalty=1.0, allowed=[3], vocab_size=128_256),
    ]
    logits = torch.empty(2, 128_256)
    arrays, asked = described(rows, 128_256)
    tensors, out = upload(arrays, "cpu", 2), SampledTokens.allocate(4, "cpu")
    sampler = TritonSampler(4, 128_256, "cpu")
    made = {}
    for launch in launches(lambda: sampler.sample(logits, tensors, asked, out)):
        made[launch.kernel.__name__] = launch.compiled(arch)
    assert made.keys() == ALL_KERNELS
    for name, each in made.items():
        assert each.spills == 0 and each.shared <= 8 << 10, name
        assert each.registers <= 128, name  # so that 16 warps find room
    for name in ("_find_peaks", "_sum_weights", "_pick", "_mark", "_list", "_logprobs_of_chunk"):
        assert "ld.global.v4" in made[name].ptx, name  # 16 bytes at a time
    assert "fma.rn.f32" not in made["_change"].ptx  # which would round less than the oracle
