"""Families with recurrent layers, against transformers."""

from __future__ import annotations

import pytest
import torch
from tiny_hybrids import CASES, make_model
from tiny_transformers import VOCAB


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory):
    """A folder, prompts, and transformers' logits of them."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (5, 37, 70)
    ]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return folder, prompts, logits


def largest_difference(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_logits_agree(checkpoint, driver):
    folder, prompts, theirs = checkpoint
    assert theirs[0].std() > 0.3
    assert largest_difference(driver(folder).logits(prompts), theirs) < 1e-4


def test_native_logits_agree(checkpoint, native_driver):
    folder, prompts, theirs = checkpoint
    assert largest_difference(native_driver(folder).logits(prompts), theirs) < 1e-3


def test_greedy_decoding_is_what_a_whole_prompt_gives(checkpoint, driver):
    folder, prompts, _ = checkpoint
    ours, prompts = driver(folder), prompts[:2]
    for prompt, output in zip(prompts, ours.greedy(prompts, 64), strict=True):
        whole = ours.logits([prompt + output])[0]
        assert whole[len(prompt) - 1 : -1].argmax(-1).tolist() == output
