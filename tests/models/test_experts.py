"""Models with experts: random checkpoints, as transformers saves them, against transformers."""

from __future__ import annotations

import pytest
import torch
from tiny_transformers import EXPERT_CASES, VOCAB, make_model

# Of float32 sums in another order; where logits of two experts are nearly equal, more would differ.
TOLERANCE, NATIVE_TOLERANCE = 1e-4, 1e-3


@pytest.fixture(scope="module", params=EXPERT_CASES)
def case(request, tmp_path_factory):
    """A folder, prompts, and what transformers says of them."""
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 70, (6,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
    return folder, prompts, logits


def largest_difference(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_logits_agree(case, driver):
    folder, prompts, logits = case
    assert largest_difference(driver(folder).logits(prompts), logits) < TOLERANCE


def test_native_logits_agree(case, native_driver):
    folder, prompts, logits = case
    assert largest_difference(native_driver(folder).logits(prompts), logits) < NATIVE_TOLERANCE
