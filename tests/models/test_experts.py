"""Models with experts: random checkpoints, as transformers saves them, against transformers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import gguf
import pytest
import torch
from tiny_transformers import EXPERT_CASES, make_model

from octavo.errors import UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_export import export_gguf
from octavo.quantization.ggml_types import GGMLType

# Of float32 sums in another order; where logits of two experts are nearly equal, more would differ.
TOLERANCE, NATIVE_TOLERANCE = 1e-4, 1e-3

# Qwen's GGUF files have experts in all layers, and llama.cpp always normalizes Qwen 3's weights.
NOT_IN_GGUF = ("qwen2-moe-mixed", "qwen3-moe-step")
ARCHITECTURES = {
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
}


class Case(NamedTuple):
    name: str
    folder: Path
    prompts: list[list[int]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module", params=EXPERT_CASES)
def case(request, tiny_model, tmp_path_factory):
    """A folder with a tokenizer, prompts, and what transformers says of them."""
    ids = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
    model = make_model(request.param, **ids)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_model / file, folder / file)
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 70, (6,), generator=generator).tolist()
    prompts = [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
    return Case(request.param, folder, prompts, logits)


def largest_difference(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_logits_agree(case, driver):
    logits = driver(case.folder).logits(case.prompts)
    assert largest_difference(logits, case.logits) < TOLERANCE


def test_native_logits_agree(case, native_driver):
    logits = native_driver(case.folder).logits(case.prompts)
    assert largest_difference(logits, case.logits) < NATIVE_TOLERANCE


def as_f32(matrix):
    return GGMLType.F32


def test_gguf_files_are_the_same_model(case, native_driver, tmp_path):
    out = tmp_path / "model.gguf"
    if case.name in NOT_IN_GGUF:
        with pytest.raises(UnsupportedModelError, match="cannot say its experts"):
            export_gguf(out, open_checkpoint(case.folder), as_f32)
        return
    export_gguf(out, open_checkpoint(case.folder), as_f32)
    logits = native_driver(out).logits(case.prompts)
    assert largest_difference(logits, case.logits) < NATIVE_TOLERANCE
    theirs = {tensor.name: tensor.shape for tensor in gguf.GGUFReader(out).tensors}
    known = gguf.MODEL_TENSORS[ARCHITECTURES[open_checkpoint(out).config().architecture]]
    templates = {gguf.TENSOR_NAMES[tensor] for tensor in known}
    names = {re.sub(r"\d+", "{bid}", name.rpartition(".")[0]) for name in theirs}
    assert names <= templates
