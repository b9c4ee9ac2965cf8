"""GGUF files that were written of whole models, read again."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import ConfigError, ModelFileError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf import GGUFFile
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.quantization.ggml_types import GGMLType
from octavo.text.folder_tokenizer import load_folder_tokenizer
from octavo.text.gguf_tokenizer import load_gguf_tokenizer

F32 = GGMLType.F32
PROMPTS = [[3 + 37 * i % 190 for i in range(50)], [5, 6, 7]]
NAMES = ["llama", "llama-biases", "llama-llama3", "mistral-window", "qwen2", "qwen3", "gemma3"]


def as_f32(matrix) -> GGMLType:
    return F32


def quantize(type, rows, parameter):
    return gguf.quants.quantize(rows, gguf.GGMLQuantizationType(type))


def same_tensors(path, other) -> bool:
    with GGUFFile(path) as a, GGUFFile(other) as b:
        assert list(a.tensors) == list(b.tensors)
        return all(
            a.tensors[name].type == b.tensors[name].type
            and a.data(name).tobytes() == b.data(name).tobytes()
            for name in a.tensors
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_the_same_model(name, tiny_hf, driver, tmp_path):
    source, out = tiny_hf(name), tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(source), as_f32)
    for ours, theirs in zip(
        driver(out).logits(PROMPTS), driver(source).logits(PROMPTS), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_exact(name, tiny_hf, tmp_path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    export_gguf(first, open_checkpoint(tiny_hf(name)), as_f32)
    write_hf_folder(tmp_path / "folder", open_checkpoint(first))
    export_gguf(second, open_checkpoint(tmp_path / "folder"), as_f32)
    assert same_tensors(first, second)
    a, b = (open_checkpoint(path).config() for path in (first, second))
    assert a.differences(b) == ["name"]


def test_rows_are_where_llama_cpp_looks_for_them(tiny_hf, tmp_path):
    """By the words of its converter: heads of two halves become pairs of neighbours."""
    source, out = tiny_hf("llama"), tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(source), as_f32)
    ours = open_checkpoint(source).read("model.layers.0.self_attn.q_proj.weight").floats()
    theirs = open_checkpoint(out).read("blk.0.attn_q.weight").floats()
    halves = ours.reshape(4, 2, 8, 64)  # heads, halves, pairs, values
    np.testing.assert_array_equal(theirs, halves.swapaxes(1, 2).reshape(64, 64))


def test_gemma_norms_are_what_is_multiplied_by(tiny_hf, tmp_path):
    source, out = tiny_hf("gemma3"), tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(source), as_f32)
    less_one = open_checkpoint(source).read("model.layers.0.self_attn.k_norm.weight").floats()
    stored = open_checkpoint(out).read("blk.0.attn_k_norm.weight").floats()
    np.testing.assert_array_equal(stored, less_one + np.float32(1))


def test_another_implementation_reads_it(tiny_hf, tmp_path):
    out = tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(tiny_hf("llama-llama3")), as_f32, metadata={"a.b": "c"})
    reader = gguf.GGUFReader(out)
    value = {key: field.contents() for key, field in reader.fields.items()}
    assert value["general.architecture"] == "llama"
    assert value["general.quantization_version"] == 2 and value["general.file_type"] == 0
    assert value["llama.rope.dimension_count"] == value["llama.attention.key_length"] == 16
    assert value["tokenizer.ggml.pre"] == "gpt-2" and len(value["tokenizer.ggml.tokens"]) == 260
    assert value["a.b"] == "c"
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["rope_freqs.weight"] == "F32" and max(map(len, types)) < 64


def test_quantized_blocks_are_those_of_the_encoder(tiny_hf, tmp_path):
    source, out = tiny_hf("llama-biases"), tmp_path / "model.gguf"
    asked = []

    def type_of(matrix):
        asked.append((matrix.name, matrix.parameter, matrix.shape, matrix.type))
        return GGMLType.Q8_0 if "ffn" in matrix.name else GGMLType.Q4_0

    export_gguf(out, open_checkpoint(source), type_of, quantize)
    assert ("blk.2.ffn_down.weight", "model.layers.2.mlp.down_proj.weight", (64, 96), F32) in asked
    assert len(asked) == 3 * 7 + 2  # neither norms nor biases
    plain = open_checkpoint(source)
    with GGUFFile(out) as file:
        assert file.metadata["general.file_type"] == 7  # three quarters of the weights
        assert file.tensors["blk.0.attn_q.bias"].type == file.tensors["output_norm.weight"].type
        rows = plain.read("model.layers.1.mlp.up_proj.weight").floats()
        expected = quantize(GGMLType.Q8_0, rows, "")
        np.testing.assert_array_equal(file.data("blk.1.ffn_up.weight"), expected)


def test_what_has_its_type_is_copied(tiny_hf, tmp_path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    export_gguf(first, open_checkpoint(tiny_hf("gemma3")), lambda m: GGMLType.Q4_0, quantize)
    export_gguf(second, open_checkpoint(first), lambda matrix: matrix.type)
    assert same_tensors(first, second)
    with GGUFFile(first) as a, GGUFFile(second) as b:
        assert a.metadata.keys() == b.metadata.keys()
        for key, value in a.metadata.items():
            np.testing.assert_array_equal(b.metadata[key], value)


def test_types_that_cannot_be_are_refused_before_a_byte_is_written(tiny_hf, tmp_path):
    checkpoint = open_checkpoint(tiny_hf("llama"))
    out = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match=r"rows of 64 values cannot be Q4_K.*blocks of 256"):
        export_gguf(out, checkpoint, lambda matrix: GGMLType.Q4_K, quantize)
    with pytest.raises(ConfigError, match="nothing was given that makes Q4_0 of it"):
        export_gguf(out, checkpoint, lambda matrix: GGMLType.Q4_0)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama-gelu", "activation"),
        ("llama-dynamic", "rope"),
        ("qwen2-window", "layer_windows"),
    ],
)
def test_models_that_a_file_cannot_say(name, field, tiny_hf, tmp_path):
    with pytest.raises(UnsupportedModelError, match=f"cannot say its {field}"):
        export_gguf(tmp_path / "model.gguf", open_checkpoint(tiny_hf(name)), as_f32)
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_is_the_same(tiny_hf, tmp_path):
    source, out = tiny_hf("llama"), tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(source), as_f32)
    ours = load_gguf_tokenizer(open_checkpoint(out).metadata, out)
    theirs = load_folder_tokenizer(source)
    messages = [{"role": "user", "content": "H\u00f6her, 12 <bos>!"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert ours.stop_token_ids == theirs.stop_token_ids


def test_how_a_file_was_cut_is_not_copied(tiny_hf, tmp_path):
    """Nor how it was aligned: a reader would look for tensors in the wrong places."""
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    more = {"general.alignment": 32, "split.count": 1, "general.file_type": 7}
    export_gguf(first, open_checkpoint(tiny_hf("llama")), as_f32, metadata=more)
    export_gguf(second, open_checkpoint(first), as_f32)
    with GGUFFile(second) as file:
        assert not {"general.alignment", "split.count"} & file.metadata.keys()
        assert file.metadata["general.file_type"] == 7  # of a copy, what the file itself says


def test_a_tokenizer_with_too_many_tokens(tiny_hf, tmp_path):
    folder = shutil.copytree(tiny_hf("llama"), tmp_path / "folder")
    config = json.loads((folder / "tokenizer.json").read_text())
    token = {**config["added_tokens"][0], "id": 260, "content": "<one more>"}
    config["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="261 tokens, but the embedding has 260 rows"):
        export_gguf(tmp_path / "model.gguf", open_checkpoint(folder), as_f32)


def test_end_tokens_that_only_the_config_knows(tiny_hf, tmp_path):
    folder = shutil.copytree(tiny_hf("llama"), tmp_path / "folder")
    generation = {"eos_token_id": [256, 258, 259], "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    out = tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(folder), as_f32)
    config = open_checkpoint(out).config()
    assert config.eos_token_ids == (256, 258, 259) and config.sampling_defaults == {
        "temperature": 0.5
    }
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 258, 259, 5]}')
    with pytest.raises(UnsupportedModelError, match="cannot say its eos_token_ids"):
        export_gguf(out, open_checkpoint(folder), as_f32)


@pytest.mark.parametrize("name", ["olmo2", "olmoe"])
def test_a_tied_head_is_written_where_llama_cpp_needs_one(name, tiny_hf, driver, tmp_path):
    """Its code for these reads ``output.weight``, and does not take the embedding for it."""
    folder, out = tmp_path / "tied", tmp_path / "model.gguf"
    shutil.copytree(tiny_hf(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config().tie_embeddings
    export_gguf(out, checkpoint, as_f32)
    with GGUFFile(out) as made:
        assert made.data("output.weight").tobytes() == made.data("token_embd.weight").tobytes()
    for ours, theirs in zip(
        driver(out).logits(PROMPTS), driver(folder).logits(PROMPTS), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
