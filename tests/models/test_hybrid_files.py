"""Models with recurrent layers in files of both kinds, written and read again."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from tiny_hybrids import GGUF_CASES, make_model

from octavo.base.errors import UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.checkpoint_check import inspect_model
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.quantization.ggml_types import GGMLType

PROMPTS = [[3 + 37 * i % 190 for i in range(50)], [5, 6, 7]]


def as_f32(matrix) -> GGMLType:
    return GGMLType.F32


@pytest.fixture(scope="module")
def folder_of(tiny_model, tmp_path_factory):
    """``folder_of(name)``: a folder of one of the cases, with a tokenizer."""

    def make(name, **more):
        folder = tmp_path_factory.mktemp(name)
        ids = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
        make_model(name, **ids, **more).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tiny_model / file, folder / file)
        return folder

    return make


@pytest.fixture(scope="module", params=GGUF_CASES)
def source(request, folder_of):
    return folder_of(request.param, **GGUF_CASES[request.param])


def tensors(path):
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name).floats() for name in checkpoint.tensors}


def test_a_gguf_file_is_the_same_model(source, driver, tmp_path):
    out = tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(source), as_f32)
    assert inspect_model(out).problems == () and inspect_model(source).problems == ()
    pairs = zip(driver(out).logits(PROMPTS), driver(source).logits(PROMPTS), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_there_and_back(source, tmp_path):
    """Decays are stored without their logarithm, so that they are rounded."""
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    export_gguf(first, open_checkpoint(source), as_f32)
    if open_checkpoint(first).config().experts is None:
        write_hf_folder(tmp_path / "folder", open_checkpoint(first))
        export_gguf(second, open_checkpoint(tmp_path / "folder"), as_f32)
    else:
        export_gguf(second, open_checkpoint(first), as_f32)
    ours, theirs = tensors(second), tensors(first)
    assert list(ours) == list(theirs)
    for name, values in ours.items():
        rtol = 1e-6 if name.endswith("ssm_a") else 0
        np.testing.assert_allclose(values, theirs[name], rtol=rtol, atol=0, err_msg=name)


@pytest.mark.parametrize("name", ["lfm2-odd", "granite-odd", "falcon", "qwen3-next"])
def test_a_folder_is_the_same_model(name, folder_of, tmp_path):
    source, out = folder_of(name), tmp_path / "folder"
    write_hf_folder(out, open_checkpoint(source))
    a, b = (open_checkpoint(path).config() for path in (source, out))
    assert a.differences(b) == ["name"]
    ours, theirs = tensors(out), tensors(source)
    assert ours.keys() == theirs.keys()
    for tensor, values in ours.items():
        np.testing.assert_array_equal(values, theirs[tensor], err_msg=tensor)


def test_a_folder_of_qwen3_next_with_experts(folder_of, driver, tmp_path):
    source, out = folder_of("qwen3-next-experts"), tmp_path / "folder"
    write_hf_folder(out, open_checkpoint(source))
    pairs = zip(driver(out).logits(PROMPTS), driver(source).logits(PROMPTS), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("lfm2", {}, "cannot say its recurrence"),
        ("granite-odd", {"mamba_conv_bias": True}, "twice the 48 values"),
        ("granite", {"mamba_conv_bias": False}, "adds a bias to each convolution"),
        ("falcon", {"tie_word_embeddings": True}, "would need two"),
        ("qwen3-next", {}, "with experts"),
    ],
)
def test_what_llama_cpp_does_not_run_is_refused(name, more, reason, folder_of, tmp_path):
    with pytest.raises(UnsupportedModelError, match=reason):
        export_gguf(tmp_path / "model.gguf", open_checkpoint(folder_of(name, **more)), as_f32)
