"""Models with recurrent layers in files of both kinds, written and read again."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from loading import load_model
from safetensors.numpy import load_file, save_file
from tiny_hybrids import GGUF_CASES, make_model

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.models import experts as moe
from octavo.models import mamba2, qwen3_next
from octavo.models.checkpoint import open_checkpoint
from octavo.models.checkpoint_check import inspect_model
from octavo.models.family import FileValues, HFNames, TensorNames, concatenated
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.models.hybrid import GGUF_CONV, mixer_names
from octavo.models.llama import GGUF_LAYER, GGUF_TOP
from octavo.models.parameters import Parameters
from octavo.models.qwen_moe import SHARED_EXPERT
from octavo.models.tensor_split import cut_of
from octavo.quantization.base import StoredWeight, float_bytes
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


# -- modules whose weights are several tensors in files -------------------------------------------

_MIXER = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj")
_GGUF_MIXER = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_gate": "self_attn.gate_proj",
    "attn_qkv": "mixer.in_proj_qkv",
    "attn_gate": "mixer.in_proj_z",
    "ssm_beta": "mixer.in_proj_b",
    "ssm_alpha": "mixer.in_proj_a",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_PARTS = ("mixer.in_proj_b", "mixer.in_proj_a")


def _sizes(config) -> tuple[int, int]:
    return (config.recurrence.delta.value_heads,) * 2


_JOINED = {"mixer.in_proj_ba": concatenated(_PARTS, _sizes)}
# Qwen3-Next, whose linear attention has a tensor for each of its projections, as Qwen3.5's has.
AS_QWEN35 = replace(
    qwen3_next.QWEN3_NEXT,
    hf_names=HFNames(layer={**SHARED_EXPERT, **mixer_names("linear_attn", _MIXER)}, joined=_JOINED),
    gguf_names=TensorNames(
        GGUF_TOP,
        {**GGUF_LAYER, **moe.GGUF_LAYER, **_GGUF_MIXER},
        values={
            "mixer.conv1d.weight": GGUF_CONV,
            "mixer.A_log": FileValues(mamba2.log_decays, mamba2.decays),
        },
        joined=_JOINED,
    ),
    fused={},
    row_order=lambda config, parameter: None,
)
GATES = "model.layers.0.mixer.in_proj_ba.weight"


def parameters_of(path):
    """All parameters as the model has them, by name."""
    parameters = Parameters(open_checkpoint(path))
    return {name: parameters.rows(name) for name in parameters.names}


@pytest.fixture
def qwen35(folder_of, tmp_path, monkeypatch):
    """A folder of `AS_QWEN35`, and the parameters that it was made of."""
    source, folder = folder_of("qwen3-next-experts"), tmp_path / "qwen35"
    wanted = parameters_of(source)
    heads = open_checkpoint(source).config().recurrence.delta.value_heads
    apart = {}
    for name, values in wanted.items():
        pieces = {name: values}
        if "in_proj_ba" in name:
            b, a = (name.replace("_ba", f"_{kind}") for kind in "ba")
            pieces = {b: values[:heads], a: values[heads:].copy()}
        apart |= {AS_QWEN35.hf_names.tensor(each): part for each, part in pieces.items()}
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(apart, folder / "model.safetensors")
    monkeypatch.setattr(qwen3_next, "QWEN3_NEXT", AS_QWEN35)
    return folder, wanted


def test_several_tensors_of_a_file_are_one_weight_by_declaration(qwen35, tmp_path):
    """Loading, export to GGUF, and back to a folder follow from the family's ``joined``."""
    folder, wanted = qwen35
    assert inspect_model(folder).problems == ()
    exported, back = tmp_path / "model.gguf", tmp_path / "back"
    export_gguf(exported, open_checkpoint(folder), as_f32)
    names = open_checkpoint(exported).tensors
    assert {"blk.0.ssm_beta.weight", "blk.0.ssm_alpha.weight"} <= names.keys()
    write_hf_folder(back, open_checkpoint(folder))
    assert tensors(back).keys() == tensors(folder).keys()
    for path in (folder, exported, back):
        found = parameters_of(path)
        assert found.keys() == wanted.keys()
        for name, values in found.items():
            is_rounded = path == exported and name.endswith(("A_log", "norm.weight"))
            limits = {"rtol": 1e-6, "atol": 1e-7} if is_rounded else {"rtol": 0, "atol": 0}
            np.testing.assert_allclose(values, wanted[name], **limits, err_msg=name)


def test_devices_share_each_part_of_a_joined_weight_by_itself(qwen35):
    folder, wanted = qwen35
    config = open_checkpoint(folder).config()
    cut = cut_of(config, GATES, wanted[GATES].shape)
    assert (cut.axis, tuple(count * size for count, size in cut.blocks)) == (0, _sizes(config))


def test_a_part_that_is_missing_is_named_by_the_whole(qwen35):
    folder, _ = qwen35
    kept = load_file(folder / "model.safetensors")
    del kept["model.layers.0.linear_attn.in_proj_a.weight"]
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"tensors are missing: {GATES}"):
        load_model(folder)


def test_parts_that_do_not_fit_are_an_error(qwen35):
    folder, _ = qwen35
    kept = load_file(folder / "model.safetensors")
    name = "model.layers.0.linear_attn.in_proj_a.weight"
    save_file({**kept, name: kept[name][:, :8].copy()}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"in_proj_b\.weight"):
        load_model(folder)


def test_vectors_are_concatenated_too():
    vectors = [np.arange(3, dtype=np.float32), np.arange(3, 8, dtype=np.float32)]
    data = [float_bytes(vector[None], GGMLType.F32) for vector in vectors]
    shapes = [vector.shape for vector in vectors]
    weights = [StoredWeight(GGMLType.F32, *each) for each in zip(data, shapes, strict=True)]
    found = concatenated(("a", "b"), lambda config: (3, 5)).join(weights)
    np.testing.assert_array_equal(found.floats(), np.arange(8))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("types", [("F32", "F32"), ("BF16", "F32")])
def test_a_concatenation_is_split_and_joined_along_its_axis(axis, types):
    joined = concatenated(("a", "b"), lambda config: (3, 5), axis)
    parts = [take(np.eye(8)) for take in joined.split(None)]
    np.testing.assert_array_equal(np.concatenate(parts, axis), np.eye(8))
    weights = []
    for part, type in zip(parts, types, strict=True):
        values = np.ascontiguousarray(part, dtype=np.float32)
        data = float_bytes(values, GGMLType[type])
        weights.append(StoredWeight(GGMLType[type], data, values.shape))
    found = joined.join(weights)
    assert found.type.name == "F32" and found.shape == (8, 8)
    np.testing.assert_array_equal(found.floats(), np.eye(8))
