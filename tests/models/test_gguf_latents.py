"""What makes keys and values of latents, in GGUF files: written in two tensors, read in two or one.

What llama.cpp expects is said here by its converter and its loader (2025-04 and later): shapes from
the outermost dimension on, as in torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf import GGUFFile
from octavo.models.gguf_export import export_gguf
from octavo.models.gguf_writer import TensorToWrite, write_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.models.tensor_map import source_of
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_mixes import MIXES
from octavo.quantize.methods import QuantizeRequest
from octavo.quantize.quantization_job import make
from octavo.sources.open import load_tokenizer

F32_TOLERANCE, NATIVE_TOLERANCE = 1e-4, 1e-3
PROMPTS = [list(range(3, 50)), [5, 6]]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 without q_lora": ("deepseek-v2", {}),
    "v2 with q_lora": ("deepseek-v2", {"q_lora_rank": 24}),
    "v2 without experts": ("deepseek-v2", {"first_k_dense_replace": 9}),
    "v3 without q_lora": ("deepseek-v3", {"q_lora_rank": None}),
    "v3 with yarn": ("deepseek-v3", {}),
    "v3 of 5 heads": ("deepseek-v3-halves", {}),
    "as many values as keys": ("deepseek-v2", {"v_head_dim": 16}),
}


@pytest.fixture(params=MODELS)
def folder(request, tiny_hf) -> Path:
    name, more = MODELS[request.param]
    return tiny_hf(name, **more)


def as_f32(matrix) -> GGMLType:
    return GGMLType.F32


def quantize(type, rows, parameter):
    return gguf.quants.quantize(rows, gguf.GGMLQuantizationType(type))


def sizes_of(folder: Path) -> dict[str, Any]:
    sizes: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return sizes


def is_near(ours, theirs, tolerance) -> bool:
    return all((a - b).abs().max() < tolerance for a, b in zip(ours, theirs, strict=True))


def kv_b(path: Path, layer: int = 0) -> Any:
    """The matrix of a layer as it is read, of one tensor or of two."""
    checkpoint = open_checkpoint(path)
    name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
    return source_of(checkpoint, checkpoint.config())[name].read(checkpoint)


def in_one(source: Path, out: Path, type: GGMLType = GGMLType.F32) -> Path:
    """A file as from before 2025-04: ``attn_kv_b``, and sizes of heads alone."""
    checkpoint = open_checkpoint(source)
    latent = checkpoint.config().latent
    assert latent is not None
    with GGUFFile(source) as file:
        tensors = []
        for name, entry in file.tensors.items():
            if name.endswith(".attn_v_b.weight"):
                continue
            if not name.endswith(".attn_k_b.weight"):
                tensors.append(TensorToWrite(name, entry.shape, entry.type, [file.data(name)]))
                continue
            name = name.replace("_k_b", "_kv_b")
            rows = kv_b(source, int(name.split(".")[1])).floats()
            data = rows if type == GGMLType.F32 else quantize(type, rows, name)
            tensors.append(TensorToWrite(name, rows.shape, type, [data]))
        kind = "deepseek2.attention."
        of_halves = (f"{kind}key_length_mla", f"{kind}value_length_mla")
        before = {key: value for key, value in file.metadata.items() if key not in of_halves}
        before |= {
            f"{kind}head_count_kv": file.metadata[f"{kind}head_count"],
            f"{kind}key_length": latent.query_dim,
            f"{kind}value_length": latent.value_dim,
        }
        write_gguf(out, before, tensors)
    return out


# -- what is written


def test_tensors_and_metadata_are_those_of_llama_cpp(folder, tmp_path):
    out, sizes = tmp_path / "model.gguf", sizes_of(folder)
    export_gguf(out, open_checkpoint(folder), as_f32)
    reader = gguf.GGUFReader(out)
    said = {key: field.contents() for key, field in reader.fields.items()}
    rank, rope_dim = sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    heads, nope_dim = sizes["num_attention_heads"], sizes["qk_nope_head_dim"]
    keys = gguf.Keys
    for key, value in {
        keys.Attention.HEAD_COUNT: heads,
        keys.Attention.HEAD_COUNT_KV: 1,
        keys.Attention.KEY_LENGTH: rank + rope_dim,
        keys.Attention.VALUE_LENGTH: rank,
        keys.Attention.KEY_LENGTH_MLA: nope_dim + rope_dim,
        keys.Attention.VALUE_LENGTH_MLA: sizes["v_head_dim"],
        keys.Attention.KV_LORA_RANK: rank,
        keys.Rope.DIMENSION_COUNT: rope_dim,
    }.items():
        assert said[key.format(arch="deepseek2")] == value, key
    shapes = {tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in reader.tensors}
    for layer in range(sizes["num_hidden_layers"]):
        assert shapes[f"blk.{layer}.attn_k_b.weight"] == (heads, rank, nope_dim)
        assert shapes[f"blk.{layer}.attn_v_b.weight"] == (heads, sizes["v_head_dim"], rank)
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.DEEPSEEK2]}
    modules = {name.removesuffix(".weight").removesuffix(".bias") for name in shapes}
    layers = range(sizes["num_hidden_layers"])
    assert modules <= {each.format(bid=layer) for each in known for layer in layers}
    assert not [name for name in shapes if "attn_kv_b" in name]


def test_values_are_where_llama_cpp_looks_for_them(folder, tmp_path):
    """Of each head its rows for keys, turned, and its rows for values."""
    out, sizes = tmp_path / "model.gguf", sizes_of(folder)
    export_gguf(out, open_checkpoint(folder), as_f32)
    rows = open_checkpoint(folder).read("model.layers.1.self_attn.kv_b_proj.weight").floats()
    heads = rows.reshape(sizes["num_attention_heads"], -1, sizes["kv_lora_rank"])
    nope_dim = sizes["qk_nope_head_dim"]
    with GGUFFile(out) as file:
        keys, values = (
            file.data(f"blk.1.attn_{half}_b.weight")
            .view("<f4")
            .reshape(file.tensors[f"blk.1.attn_{half}_b.weight"].shape)
            for half in "kv"
        )
    np.testing.assert_array_equal(keys, heads[:, :nope_dim].transpose(0, 2, 1))
    np.testing.assert_array_equal(values, heads[:, nope_dim:])


# -- what is read of it


def test_it_is_the_same_model(folder, driver, native_driver, tmp_path):
    out = tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(folder), as_f32)
    theirs = driver(folder).logits(PROMPTS)
    assert is_near(driver(out).logits(PROMPTS), theirs, F32_TOLERANCE)
    assert is_near(native_driver(out).logits(PROMPTS), theirs, NATIVE_TOLERANCE)


@pytest.mark.parametrize("type", [GGMLType.F16, GGMLType.BF16], ids=str)
def test_16_bits_of_halves_are_16_bits_of_the_matrix(type, tiny_hf, tmp_path):
    """No rounding more than that of the file, in either type: what is read is what is there."""
    folder, out = tiny_hf("deepseek-v2"), tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(folder), lambda matrix: type)
    ours = kv_b(out, 1)
    theirs = open_checkpoint(folder).read("model.layers.1.self_attn.kv_b_proj.weight").floats()
    dtype = {GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}[type]
    assert ours.format == type.name
    rounded = torch.from_numpy(theirs).to(dtype).float().numpy()
    np.testing.assert_array_equal(ours.floats(), rounded)


def test_files_from_before_are_the_same_model(folder, driver, native_driver, tmp_path):
    new = tmp_path / "new.gguf"
    export_gguf(new, open_checkpoint(folder), as_f32)
    old = in_one(new, tmp_path / "old.gguf")
    theirs = driver(folder).logits(PROMPTS)
    assert is_near(driver(old).logits(PROMPTS), theirs, F32_TOLERANCE)
    assert is_near(native_driver(old).logits(PROMPTS), theirs, NATIVE_TOLERANCE)
    configs = [open_checkpoint(path).config() for path in (old, new)]
    assert configs[0].differences(configs[1], but=["name"]) == []


def same_files(path: Path, other: Path) -> bool:
    with GGUFFile(path) as a, GGUFFile(other) as b:
        if a.tensors.keys() != b.tensors.keys() or a.metadata.keys() != b.metadata.keys():
            return False
        return all(np.array_equal(a.metadata[key], b.metadata[key]) for key in a.metadata) and all(
            a.tensors[name].type == b.tensors[name].type
            and a.data(name).tobytes() == b.data(name).tobytes()
            for name in a.tensors
        )


def test_a_copy_is_in_two_whatever_its_file_was(folder, tmp_path):
    first = tmp_path / "first.gguf"
    export_gguf(first, open_checkpoint(folder), as_f32)
    for number, source in enumerate((first, in_one(first, tmp_path / "old.gguf"))):
        copy = tmp_path / f"copy-{number}.gguf"
        export_gguf(copy, open_checkpoint(source), lambda matrix: matrix.type)
        assert same_files(copy, first)


def test_a_copy_of_blocks_has_floats_of_them(tiny_hf, driver, tmp_path):
    """Rows for keys are columns of the matrix, and no blocks of it: nothing is made of them anew,
    and so no encoder is asked for."""
    first, copy = tmp_path / "first.gguf", tmp_path / "copy.gguf"
    export_gguf(first, open_checkpoint(tiny_hf("deepseek-v2")), as_f32)
    old = in_one(first, tmp_path / "old.gguf", GGMLType.Q8_0)
    export_gguf(copy, open_checkpoint(old), lambda matrix: matrix.type)
    read = kv_b(copy)
    was = kv_b(old)
    assert (was.format, read.format) == ("Q8_0", "F16")
    np.testing.assert_allclose(read.floats(), was.dequantize(), rtol=2**-11, atol=1e-6)
    assert is_near(driver(copy).logits(PROMPTS), driver(old).logits(PROMPTS), 2e-2)


def test_a_folder_of_it_is_the_model_it_was_made_of(folder, driver, tmp_path):
    out, again = tmp_path / "model.gguf", tmp_path / "folder"
    export_gguf(out, open_checkpoint(folder), as_f32)
    write_hf_folder(again, open_checkpoint(out))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    ours, theirs = (open_checkpoint(path).read(name).floats() for path in (again, folder))
    np.testing.assert_array_equal(ours, theirs)


# -- quantized


@pytest.mark.parametrize("target", ["Q8_0", "Q4_0", "Q4_K_M", "F16", "BF16", "F32"])
def test_they_are_floats_in_every_mix(target, tiny_hf, driver, native_driver, tmp_path):
    folder, out = tiny_hf("deepseek-v2"), tmp_path / "model.gguf"
    wanted = QuantizeRequest("gguf", type=target, calibrate=False)
    made = make(open_checkpoint(folder), load_tokenizer(folder), out, wanted)
    type = GGMLType[target] if target in ("BF16", "F32") else GGMLType.F16
    with GGUFFile(out) as file:
        halves = [name for name in file.tensors if name.endswith(("_k_b.weight", "_v_b.weight"))]
        assert len(halves) == 2 * sizes_of(folder)["num_hidden_layers"]
        assert {file.tensors[name].type for name in halves} == {type}
        num_bytes = sum(tensor.num_bytes for tensor in file.tensors.values())
        assert made.num_bytes == num_bytes
        assert file.metadata["general.file_type"] == MIXES[target].file_type
    ours, theirs = native_driver(out).logits(PROMPTS), driver(out).logits(PROMPTS)
    if target in ("F16", "F32"):
        assert is_near(ours, theirs, NATIVE_TOLERANCE)
    else:  # rounded activations choose other experts here and there
        similar = torch.cosine_similarity(torch.cat(ours), torch.cat(theirs), dim=-1)
        assert similar.mean() > 0.98


def test_a_mix_for_a_size_counts_them(tiny_hf, tmp_path):
    folder, out = tiny_hf("deepseek-v2", first_k_dense_replace=9), tmp_path / "model.gguf"
    wanted = QuantizeRequest("gguf", target_bpw=9.0)
    made = make(open_checkpoint(folder), load_tokenizer(folder), out, wanted)
    assert 8.0 < made.bits_per_weight <= 9.0
    assert made.choice is not None and "kv_b_proj" not in made.choice.by_kind()
    assert kv_b(out).format == "F16"
    with pytest.raises(ConfigError, match=r"no mix has 4 bits per weight"):
        wanted = QuantizeRequest("gguf", target_bpw=4)
        make(open_checkpoint(folder), load_tokenizer(folder), tmp_path / "small.gguf", wanted)


def test_they_are_read_without_torch(tiny_hf, tmp_path, monkeypatch):
    """What is F16 in a file needs nobody who dequantizes."""
    source, out = tiny_hf("deepseek-v2"), tmp_path / "model.gguf"
    wanted = QuantizeRequest("gguf", type="Q8_0", calibrate=False)
    make(open_checkpoint(source), load_tokenizer(source), out, wanted)
    monkeypatch.setattr("octavo.quantization.base.need_torch", lambda what: pytest.fail(what))
    assert kv_b(out).format == "F16"
