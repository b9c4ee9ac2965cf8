"""Families of models against transformers: logits, greedy tokens, and their GGUF files."""

from __future__ import annotations

import pytest
import torch
from tiny_transformers import FAMILIES, VOCAB, make_model

PROMPTS = [
    torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (96, 71, 40)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a family's model, and the logits of PROMPTS as transformers has them."""
    known = {}

    def make(name):
        if name not in known:
            model, folder = make_model(name), tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            with torch.no_grad():
                logits = [model(torch.tensor([prompt])).logits[0].float() for prompt in PROMPTS]
            known[name] = folder, logits
        return known[name]

    return make


def difference(ours, theirs):
    """The largest; and a check that the best token is the same where rounding does not decide."""
    for a, b in zip(ours, theirs, strict=True):
        top = b.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2e-3
        assert torch.equal(a.argmax(-1)[clear], b.argmax(-1)[clear])
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, made, driver):
    folder, theirs = made(name)
    assert difference(driver(folder).logits(PROMPTS), theirs) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_native_logits_too(name, made, native_driver):
    folder, theirs = made(name)
    assert difference(native_driver(folder).logits(PROMPTS), theirs) < 1e-3
