"""Whole folders: a tiny Llama quantized in each format is loaded, and every parameter is right."""

from __future__ import annotations

import json

import numpy as np
import pytest
import quantized
import torch
from checkpoint_sizes import checkpoint_bytes
from loading import load_model
from safetensors.torch import load_file, save_file

from octavo.base.errors import ConfigError, ModelError, ModelFileError, UnsupportedModelError
from octavo.kernels.cpu import library
from octavo.kernels.cpu.layout import ARITHMETIC
from octavo.kernels.cpu.packed_weights import lay_out
from octavo.kernels.cuda.attention_plan import Gpu
from octavo.kernels.cuda.gemm_dispatch import GemmConditions, multiplied_as
from octavo.kernels.cuda.packing import pack
from octavo.layers.module import named_parameters
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config_hf import config_from_hf
from octavo.models.footprint import as_stored, packed, shapes, weight_types
from octavo.models.llama import LlamaForCausalLM
from octavo.quantization.base import StoredWeight
from octavo.quantization.coded import CodedWeight
from octavo.settings.engine import EngineArgs
from octavo.sources.checkpoint import CheckpointSource

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BNB_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
UP = "model.layers.1.mlp.up_proj"


def compressed(weights, activations=None, **changes):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    return {**config, "config_groups": {"group_0": group}, "ignore": ["lm_head"], **changes}


W4 = compressed({"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False})

INT8_ROWS = {"num_bits": 8, "strategy": "channel"}
FP8_ROWS = {**INT8_ROWS, "type": "float"}
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
OF_A_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def fp8_rows(rng, n, k):
    return quantized.float8(rng, n, k, (1, k), "weight_scale")


FORMATS = {
    "gptq": (GPTQ, quantized.gptq),
    "gptq-3bit": ({**GPTQ, "bits": 3}, lambda rng, n, k: quantized.gptq(rng, n, k, 3)),
    "awq": (AWQ, quantized.awq),
    "pack-quantized": (W4, quantized.pack_quantized),
    "int-quantized": (
        compressed(INT8_ROWS),
        quantized.int_quantized,
    ),
    "float-quantized": (compressed(FP8_ROWS), fp8_rows),
    "mxfp4": (
        compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
        lambda rng, n, k: quantized.float4(rng, n, k, "mxfp4"),
    ),
    "nvfp4": (
        compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
        lambda rng, n, k: quantized.float4(rng, n, k, "nvfp4"),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 16]},
        lambda rng, n, k: quantized.float8(rng, n, k, (32, 16), "weight_scale_inv"),
    ),
    "nf4": (BNB, quantized.four_bits),
    "nf4-across-rows": (BNB, lambda rng, n, k: quantized.four_bits(rng, n, k, block=96)),
    "int8": (BNB_INT8, quantized.int8),
}


FOR_ACTIVATIONS = {
    "W8A8": (compressed(INT8_ROWS, TOKENS), quantized.int_quantized, torch.int8),
    "W8A16": (compressed(INT8_ROWS), quantized.int_quantized, torch.bfloat16),
    "W8A4": (
        compressed(INT8_ROWS, {**TOKENS, "num_bits": 4}), quantized.int_quantized, torch.bfloat16
    ),
    "FP8": (compressed(FP8_ROWS, {**TOKENS, "type": "float"}), fp8_rows, torch.float8_e4m3fn),
    "static FP8": (compressed(FP8_ROWS, OF_A_TENSOR), fp8_rows, torch.float8_e4m3fn),
    "FP8 of weights": (compressed(FP8_ROWS), fp8_rows, torch.bfloat16),
    "fp8": ({"quant_method": "fp8"}, fp8_rows, torch.float8_e4m3fn),
    "static fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8_rows, torch.float8_e4m3fn
    ),
    "fp8 of another scheme": (
        {"quant_method": "fp8", "activation_scheme": "none"}, fp8_rows, torch.bfloat16
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_rows, torch.float8_e4m3fn),
    "fp8 in blocks": (*FORMATS["fp8"], torch.bfloat16),
    "packed 8 bits": (
        compressed({**INT8_ROWS, "symmetric": True}),
        lambda rng, n, k: quantized.pack_quantized(rng, n, k, 8, k, symmetric=True),
        torch.bfloat16,
    ),
    "gptq of 8 bits": (
        {**GPTQ, "bits": 8, "group_size": -1, "sym": True},
        lambda rng, n, k: quantized.gptq(rng, n, k, 8, k, symmetric=True),
        torch.bfloat16,
    ),
    "bitsandbytes": (BNB_INT8, quantized.int8, torch.bfloat16),
}  # fmt: skip
"""Checkpoints of 8 bits, and as what a GPU multiplies them with the rows of a prompt."""


def write_folder(folder, config, pack):
    """A Llama of random weights whose projections ``pack`` has quantized; its values by name."""
    rng = np.random.default_rng(0)
    tensors, values = {}, {}
    parsed = config_from_hf(config, {}, path=folder / "config.json")
    for name, parameter in named_parameters(LlamaForCausalLM(parsed)):
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            packed = pack(rng, *parameter.shape)
            tensors |= {f"{module}.{part}": tensor for part, tensor in packed.tensors.items()}
            values[name] = packed.values
        else:
            tensors[name] = torch.from_numpy(rng.normal(size=parameter.shape)).bfloat16()
            values[name] = tensors[name].float().numpy()
    for layer in range(2):  # which are of no weight
        attention = f"model.layers.{layer}.self_attn"
        for name in ("k_scale", "v_proj.v_scale", "q_proj.input_scale"):
            tensors[f"{attention}.{name}"] = torch.ones(1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.fixture
def tiny_config(tiny_model):
    """A tiny Llama with a head of its own and biases in its attention."""
    config = json.loads((tiny_model / "config.json").read_text())
    return {**config, **SIZES, "tie_word_embeddings": False, "attention_bias": True}


@pytest.fixture
def folder(tiny_config, tmp_path):
    """One in GPTQ."""
    path = tmp_path / "model"
    write_folder(path, {**tiny_config, "quantization_config": GPTQ}, quantized.gptq)
    return path


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def values_of(value):
    if isinstance(value, CodedWeight):
        return value.dequantize()
    return value.floats() if isinstance(value, StoredWeight) else value


@pytest.mark.parametrize("kind", FOR_ACTIVATIONS)
def test_the_checkpoint_says_whether_a_gpu_rounds_activations(kind, tiny_config, tmp_path):
    method, pack_values, expected = FOR_ACTIVATIONS[kind]
    folder = tmp_path / "model"
    write_folder(folder, {**tiny_config, "quantization_config": method}, pack_values)
    model, _ = load_model(folder)
    weights = dict(named_parameters(model))
    up, gate = (weights[f"model.layers.1.mlp.{name}_proj.weight"].value for name in ("up", "gate"))
    joined = pack([gate, up], "cpu", torch.bfloat16)
    for weight in (joined, pack([up.narrow(0, 64)], "cpu", torch.bfloat16)):
        assert multiplied_as(weight, GemmConditions(Gpu(90, 132))) == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_every_parameter_of_a_quantized_folder(kind, tiny_config, tmp_path):
    method, pack = FORMATS[kind]
    folder = tmp_path / "model"
    expected = write_folder(folder, {**tiny_config, "quantization_config": method}, pack)
    progress = []
    model, _ = load_model(folder, progress=lambda *now: progress.append(now))
    parameters = dict(named_parameters(model))
    assert set(parameters) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(values_of(parameters[name].value), values, err_msg=name)
    is_coded = {name: isinstance(p.value, CodedWeight) for name, p in parameters.items()}
    assert is_coded[f"{UP}.weight"] == (kind != "nf4-across-rows")
    assert not is_coded["lm_head.weight"] and not is_coded["model.embed_tokens.weight"]
    of_weights = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.endswith(("k_scale", "v_scale", "input_scale"))
    }
    total = sum(tensor.nbytes for tensor in of_weights.values())
    assert progress[-1] == (total, total) and checkpoint_bytes(folder) == total
    assert open_checkpoint(folder).quantization == method["quant_method"]


def test_parts_may_be_in_several_shards(folder):
    whole = load_model(folder).model
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard_of = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shard_of.values()):
        names = [name for name in tensors if shard_of[name] == shard]
        save_file({name: tensors[name] for name in names}, folder / shard)
    index = {"weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(folder).files == sorted(folder / name for name in set(shard_of.values()))
    parameters = dict(named_parameters(load_model(folder).model))
    for name, parameter in named_parameters(whole):
        assert np.array_equal(values_of(parameters[name].value), values_of(parameter.value))


# Where the config is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, given, pack",
    [
        ("quantize_config.json", {"bits": 4, "group_size": 16, "sym": False}, quantized.gptq),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}, quantized.awq),
    ],
)
def test_a_config_of_its_own(name, given, pack, tiny_config, tmp_path):
    folder = tmp_path / "model"
    values = write_folder(folder, tiny_config, pack)[f"{UP}.weight"]
    with pytest.raises(UnsupportedModelError, match="I32 are not supported"):
        open_checkpoint(folder)
    (folder / name).write_text(json.dumps(given))
    assert np.array_equal(values_of(open_checkpoint(folder).read(f"{UP}.weight")), values)


_W4_UNNAMED = {key: W4[key] for key in ("format", "config_groups", "ignore")}


@pytest.mark.parametrize(
    "place",
    [
        {"text_config": {"quantization_config": W4}},
        {"compression_config": _W4_UNNAMED},
        {"compression_config": {"quantization_config": _W4_UNNAMED}},
    ],
)
def test_other_places_in_the_config(place, tiny_config, tmp_path):
    folder = tmp_path / "model"
    values = write_folder(folder, {**tiny_config, **place}, quantized.pack_quantized)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization == "compressed-tensors"
    assert np.array_equal(values_of(checkpoint.read(f"{UP}.weight")), values[f"{UP}.weight"])


def test_a_config_without_quantized_weights(tiny_model, tmp_path):
    """It is a request to quantize them, or was left behind: they are what they are."""
    tensors = load_file(tiny_model / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tiny_model / "config.json").read_text())
    for method in (GPTQ, W4, BNB, {"quant_method": "fp8"}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.quantization is None and set(checkpoint.tensors) == set(tensors)
        load_model(tmp_path)


@pytest.mark.parametrize(
    "method, error, said",
    [
        ("gptq", ModelFileError, "quantization_config.*not a table"),
        ({"quant_method": "hqq"}, UnsupportedModelError, "quantized with hqq.*gptq, awq, compr"),
        ({"bits": 4}, UnsupportedModelError, "an unnamed method"),
        ({"quant_method": ["gptq"]}, ModelFileError, "quant_method"),
    ],
)
def test_methods_that_are_refused(method, error, said, folder):
    change_config(folder, lambda config: config.update(quantization_config=method))
    with pytest.raises(error, match=rf"config\.json.*{said}"):
        open_checkpoint(folder)


# What does not fit --------------------------------------------------------------------------------


def test_biases_of_zeros_that_the_model_does_not_have(folder):
    """As AutoGPTQ writes them; any other would be missing from the model."""
    bias = f"{UP}.bias"
    change_tensors(folder, lambda tensors: tensors.update({bias: torch.zeros(128)}))
    load_model(folder)
    change_tensors(folder, lambda tensors: tensors[bias][3:4].fill_(1))
    with pytest.raises(ModelFileError, match=f"does not have: {bias}"):
        load_model(folder)


def test_damaged_weights_are_named(folder):
    change_tensors(folder, lambda tensors: tensors.pop(f"{UP}.qzeros"))
    with pytest.raises(ModelFileError, match=rf"model\.safetensors \({UP}\.weight\).*qzeros"):
        load_model(folder)
    whole = torch.zeros(128, 64)
    change_tensors(folder, lambda tensors: tensors.update({f"{UP}.weight": whole}))
    with pytest.raises(ModelFileError, match=rf"{UP}\.weight.*also there quantized, as {UP}\.\w+"):
        open_checkpoint(folder)


def test_a_weight_of_another_shape(folder):
    def exchange(tensors):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors[f"{UP}.{part}"] = tensors[f"{UP.replace('up', 'down')}.{part}"].clone()

    change_tensors(folder, exchange)
    with pytest.raises(ModelFileError, match=rf"{UP}\.weight.*\[64, 128\], not \[128, 64\]"):
        load_model(folder)


def test_the_table_has_weights_of_several_tensors(folder):
    entry = open_checkpoint(folder).tensors[f"{UP}.weight"]
    assert entry.type is None and entry.shape is None and entry.num_bytes > 128 * 64 // 2


@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
@pytest.mark.parametrize("name", [*FORMATS, "gptq-act-order"])
def test_bytes_are_known_before_anything_is_packed(name, tiny_config, tmp_path):
    method, pack = FORMATS.get(name, ({**GPTQ, "group_size": 32}, in_act_order))
    folder = tmp_path / "model"
    write_folder(folder, {**tiny_config, "quantization_config": method}, pack)
    checkpoint = open_checkpoint(folder)
    types = weight_types(checkpoint, checkpoint.config())
    model = load_model(folder).model
    weights = {n: p.value for n, p in named_parameters(model) if len(p.value.shape) == 2}
    entries, _ = lay_out(weights, library.load())
    for shape in shapes(checkpoint.config()):
        spec = entries[shape.name][0]
        found = packed(shape, types[shape.name])
        assert (found.num_bytes, found.arithmetic) == (spec.num_bytes, ARITHMETIC[spec.format])
        assert as_stored(shape, types[shape.name]).num_bytes == weights[shape.name].nbytes


def in_act_order(rng, n, k):
    return quantized.gptq(rng, n, k, group=32, order=rng.permutation(k) // 32)


def test_the_setting_can_only_agree(folder):
    source = CheckpointSource(folder)
    assert source.settings(EngineArgs(str(folder), quantization="gptq")).quantization == "gptq"
    with pytest.raises(ConfigError, match=r"'awq'.*is gptq"):
        source.settings(EngineArgs(str(folder), quantization="awq"))


def test_many_mutations_of_the_header(folder):
    path = folder / "model.safetensors"
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        bad = bytearray(good)
        for at in rng.integers(8, header, 1 + rng.integers(3)):
            bad[at] = rng.choice(np.frombuffer(good[8:header], np.uint8))
        path.write_bytes(bad)
        try:
            checkpoint = open_checkpoint(folder)
            for name in checkpoint.tensors:
                checkpoint.read(name)
        except ModelError:
            refused += 1
    assert 100 < refused < 200
