"""Every parameter gets its tensor, or the error says which does not."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from loading import load_config, load_model
from safetensors.torch import load_file, save_file

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.layers.module import named_parameters
from octavo.models.loader import weights_bytes
from octavo.quantization.tensors import BlockTensor, to_torch

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def values_of(parameter):
    """As a tensor; norms are arrays in the loaded model, and matrices as they are in the file."""
    value = parameter.value
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else to_torch(value)


def test_every_parameter_is_loaded_and_nothing_is_copied(folder):
    model, config = load_model(folder)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(named_parameters(model))
    assert set(parameters) == {*tensors, "lm_head.weight"}
    for name, tensor in tensors.items():
        assert torch.equal(values_of(parameters[name]), tensor)
    assert parameters["lm_head.weight"].value is parameters["model.embed_tokens.weight"].value
    assert config == load_config(folder)
    # The tied head is counted once; norms are in float32 in this file already.
    assert weights_bytes(model) == sum(tensor.nbytes for tensor in tensors.values())


def test_progress_ends_at_the_total(folder):
    seen = []
    load_model(folder, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert seen[-1] == (total, total) and seen == sorted(seen)
    assert len(seen) == len(load_file(folder / "model.safetensors"))


def test_missing_tensors_are_named(folder):
    change_tensors(folder, lambda tensors: tensors.pop(UP))
    with pytest.raises(ModelFileError, match=f"tensors are missing: {UP}"):
        load_model(folder)


def test_extra_tensors_are_named(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))
    with pytest.raises(ModelFileError, match="does not have: model.extra"):
        load_model(folder)


def test_wrong_shapes_name_the_tensor_and_both_shapes(folder):
    change_tensors(folder, lambda tensors: tensors.update({UP: torch.zeros(48, 80)}))
    with pytest.raises(ModelFileError, match=r"\[48, 80\], not \[80, 48\]") as caught:
        load_model(folder)
    assert caught.value.field == UP and caught.value.path.name == "model.safetensors"


def test_embedding_rows_must_be_the_vocabulary(folder):
    change_config(folder, vocab_size=300)
    with pytest.raises(ModelFileError, match=r"\[260, 48\], not \[300, 48\]"):
        load_model(folder)


def test_buffers_of_old_checkpoints_are_no_parameters(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load_model(folder)


def test_tied_weights_under_either_name(folder):
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    change_tensors(folder, rename)
    parameters = dict(named_parameters(load_model(folder).model))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(values_of(parameters[name]), embedding)
    # With both, the embedding counts, as elsewhere.
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": torch.zeros(260, 48)}
    change_tensors(folder, lambda tensors: tensors.update(both))
    parameters = dict(named_parameters(load_model(folder).model))
    assert torch.equal(values_of(parameters["lm_head.weight"]), embedding)


def test_an_untied_model_needs_its_head(folder):
    change_config(folder, tie_word_embeddings=False)
    with pytest.raises(ModelFileError, match="missing: lm_head.weight"):
        load_model(folder)
    head = torch.randn(260, 48)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    parameters = dict(named_parameters(load_model(folder).model))
    assert torch.equal(values_of(parameters["lm_head.weight"]), head)


def test_a_config_can_be_given(folder):
    config = load_config(folder)
    (folder / "config.json").unlink()
    assert load_model(folder, config).config is config


def test_tokenizers_must_not_know_more_than_the_embedding(folder):
    config = load_config(folder)
    config.check_tokenizer(260, folder)
    config.check_tokenizer(200, folder)
    with pytest.raises(ModelFileError, match="261 tokens.*260 rows"):
        config.check_tokenizer(261, folder)


# GGUF ---------------------------------------------------------------------------------------------


def write_gguf(path, folder, quantize=(), extra=()):
    """The tiny model as a GGUF file, its query and key rows in the order of such files."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if ".q_proj." in name or ".k_proj." in name:
            halves = values.reshape(-1, 2, config["head_dim"] // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stem = name.removesuffix(".weight")
        target = f"{table.get_name(stem)}.weight"
        if target in dict(extra):
            continue
        if any(part in name for part in quantize):
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    for name, values in extra:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_is_the_same_model(tiny_model, tmp_path, driver):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model)
    prompts = [list(range(3, 60)), [5, 6, 7]]
    for a, b in zip(driver(tiny_model).logits(prompts), driver(path).logits(prompts), strict=True):
        assert (a - b).abs().max() < 1e-4


def test_gguf_weights_stay_quantized(tiny_model, tmp_path, driver):
    folder = tmp_path / "wide"
    shutil.copytree(tiny_model, folder)
    change_config(folder, hidden_size=64, intermediate_size=96)

    def widen(tensors):
        for name, tensor in tensors.items():
            size = [{48: 64, 80: 96}.get(n, n) for n in tensor.shape]
            tensors[name] = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 0.2

    change_tensors(folder, widen)
    path = write_gguf(tmp_path / "q8.gguf", folder, quantize=("mlp", "self_attn", "embed"))
    quantized = driver(path)
    up = quantized.model.model.layers[1].mlp.up_proj.weight.value
    assert isinstance(up, BlockTensor)
    assert weights_bytes(quantized.model) < 0.3 * weights_bytes(driver(folder).model)

    # The same as a folder with the dequantized values.
    def dequantize(tensors):
        for name, parameter in named_parameters(quantized.model):
            value = parameter.value
            if isinstance(value, BlockTensor) and name in tensors:
                value = value.dequantize()
                if ".q_proj." in name or ".k_proj." in name:
                    pairs = value.view(-1, 8, 2, value.shape[1])
                    value = pairs.transpose(1, 2).reshape(value.shape)
                tensors[name] = value.contiguous()

    change_tensors(folder, dequantize)
    prompts = [list(range(3, 60))]
    difference = quantized.logits(prompts)[0] - driver(folder).logits(prompts)[0]
    assert difference.abs().max() < 1e-4


def test_gguf_rope_factors_are_taken_from_the_file(tiny_model, tmp_path, driver):
    factors = np.array([1, 1, 1, 1, 2, 4, 8, 8], dtype=np.float32)
    extra = [("rope_freqs.weight", factors)]
    path = write_gguf(tmp_path / "factors.gguf", tiny_model, extra=extra)
    ours = driver(path)
    assert ours.model.model.rotary_emb.freq_factors.value.tolist() == factors.tolist()
    plain = driver(write_gguf(tmp_path / "plain.gguf", tiny_model))
    prompt = [list(range(3, 60))]
    assert (ours.logits(prompt)[0] - plain.logits(prompt)[0]).abs().max() > 1e-3


def test_gguf_tensors_that_the_model_does_not_have(tiny_model, tmp_path):
    extra = [("blk.0.attn_sinks.weight", np.zeros(6, dtype=np.float32))]
    path = write_gguf(tmp_path / "extra.gguf", tiny_model, extra=extra)
    with pytest.raises(ModelFileError, match="does not have: blk.0.attn_sinks.weight"):
        load_model(path)


def test_gguf_types_without_dequantization_are_refused_at_once(tiny_model, tmp_path):
    extra = [("blk.1.ffn_up.weight", np.zeros((80, 48), dtype=np.int32))]
    path = write_gguf(tmp_path / "i32.gguf", tiny_model, extra=extra)
    with pytest.raises(UnsupportedModelError, match="I32"):
        load_model(path)


def test_other_architectures_are_refused_by_name(tmp_path, folder):
    change_config(folder, architectures=["BloomForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM"):
        load_model(folder)
