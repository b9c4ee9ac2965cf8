"""Precision from the tables of files: sums are exact, whatever tensors are called."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_sizes import checkpoint_bytes
from safetensors.numpy import load_file, save_file

from octavo.base.errors import ModelFileError
from octavo.cost.file_weights import stored_bytes
from octavo.cost.open_spec import open_spec
from octavo.cost.precision import precision_of, weights_bytes
from octavo.cost.weights import weights


def test_a_folder_takes_what_its_files_have(tiny_model):
    spec = open_spec(tiny_model)
    precision = precision_of(spec)
    assert precision.name == "as stored"
    assert weights_bytes(spec, precision) == checkpoint_bytes(tiny_model)
    assert {precision.type_of(w).arithmetic for w in weights(spec)} == {"fp32"}


def test_a_gguf_file_takes_what_its_table_has(smollm2_gguf):
    spec = open_spec(smollm2_gguf)
    assert weights_bytes(spec, precision_of(spec)) == checkpoint_bytes(smollm2_gguf)


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "max_position_embeddings": 64,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16},
}


@pytest.fixture
def quantized(tmp_path):
    """A folder of GPTQ, in two shards: of each matrix four tensors, none of its own shape."""
    half, whole = np.float16, np.int32

    def codes(name: str, outputs: int, inputs: int) -> dict[str, np.ndarray]:
        return {
            f"{name}.qweight": np.zeros((inputs // 8, outputs), whole),
            f"{name}.scales": np.zeros((inputs // 16, outputs), half),
            f"{name}.qzeros": np.zeros((inputs // 16, outputs // 8), whole),
            f"{name}.g_idx": np.zeros(inputs, whole),
        }

    tensors = {"model.embed_tokens.weight": np.zeros((64, 32), half)}
    for index in range(2):
        layer = f"model.layers.{index}."
        for name, outputs in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
            tensors |= codes(f"{layer}self_attn.{name}_proj", outputs, 32)
        tensors[f"{layer}block_sparse_moe.gate.weight"] = np.zeros((2, 32), half)
        for expert in range(2):
            for name, outputs, inputs in (("w1", 48, 32), ("w3", 48, 32), ("w2", 32, 48)):
                full = f"{layer}block_sparse_moe.experts.{expert}.{name}"
                tensors |= codes(full, outputs, inputs)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = np.zeros(32, half)
    tensors |= {
        "model.norm.weight": np.zeros(32, half),
        "lm_head.weight": np.zeros((64, 32), np.float32),
    }
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(tensors.items()):
        shards["ab"[index % 2] + ".safetensors"][name] = tensor
    for name, part in shards.items():
        save_file(part, tmp_path / name)
    names = {name: shard for shard, part in shards.items() for name in part}
    index_path = tmp_path / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    return tmp_path, sum(tensor.nbytes for tensor in tensors.values())


def test_quantized_tensors_are_summed_up_by_their_parts(quantized):
    path, num_bytes = quantized
    spec = open_spec(path)
    precision = precision_of(spec)
    assert sum(stored_bytes(path).values()) == num_bytes
    assert weights_bytes(spec, precision) == num_bytes
    types = {w.part: precision.type_of(w) for w in weights(spec) if w.inputs}
    assert {part: type.arithmetic for part, type in types.items()} == {
        "embedding": "fp16",
        "attention": "fp16",
        "experts": "fp16",
        "router": "fp16",
        "head": "fp32",
    }
    assert 4 < types["experts"].bits < 8
    assert types["router"].bits == 16


def test_a_name_that_is_asked_for_wins_over_the_files(quantized):
    spec = open_spec(quantized[0])
    assert weights_bytes(spec, precision_of(spec, "bf16")) == 2 * sum(
        weight.num_params for weight in weights(spec)
    )


def test_a_shard_that_is_missing_is_named(quantized):
    path, _ = quantized
    (path / "b.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"b\.safetensors"):
        precision_of(open_spec(path))


def test_a_config_alone_has_no_files(quantized):
    path, _ = quantized
    alone = open_spec(path / "config.json")
    assert alone.source is None
    assert replace(open_spec(path), source=None, name="") == replace(alone, name="")
    assert precision_of(alone).name == "int4-g16"


def test_a_vision_tower_counts_and_modules_that_draft_do_not(tiny_model, tmp_path):
    tensors = load_file(tiny_model / "model.safetensors")
    tower = {
        "vision_tower.layers.0.self_attn.q_proj.weight": np.zeros((8, 8), np.float16),
        "multi_modal_projector.linear_1.bias": np.zeros(8, np.float16),
    }
    drafts = {"mtp.fc.weight": np.zeros((48, 96), np.float32)}
    save_file(tensors | tower | drafts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    spec, plain = open_spec(tmp_path), open_spec(tiny_model)
    assert spec.other_params == 8 * 8 + 8
    assert weights_bytes(spec, precision_of(spec)) == 2 * spec.other_params + weights_bytes(
        plain, precision_of(plain)
    )
