"""Models with latent attention: random checkpoints, as transformers saves them, against
transformers; and what they keep of a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loading import load_model
from safetensors.torch import load_file, save_file
from tiny_transformers import LATENT_CASES, VOCAB, make_model

from octavo.base.errors import ConfigError, ModelFileError, UnsupportedModelError
from octavo.layers.tensors import with_tensors
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config_hf import config_from_hf
from octavo.models.config_to_hf import hf_config
from octavo.models.footprint import kv_bytes_per_token
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.quantization.ggml_types import GGMLType
from octavo.quantize.layerwise_model import windows_context
from octavo.quantize.methods import QuantizeRequest
from octavo.quantize.quantization_job import make
from octavo.sources.open import load_tokenizer

TOLERANCE, NATIVE_TOLERANCE = 1e-4, 1e-3
# As published, without what does not matter here.
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


@pytest.fixture(scope="module", params=LATENT_CASES)
def case(request, tmp_path_factory):
    """A folder, prompts, and what transformers says of them."""
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (70, 3, 41)]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
    return folder, prompts, logits, model


def largest_difference(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_logits_agree(case, driver):
    folder, prompts, logits, _ = case
    assert largest_difference(driver(folder).logits(prompts), logits) < TOLERANCE


def test_native_logits_agree(case, native_driver):
    folder, prompts, logits, _ = case
    assert largest_difference(native_driver(folder).logits(prompts), logits) < NATIVE_TOLERANCE


def test_windows_of_calibration_agree(case):
    """Whole texts, of which nothing is kept: keys and values are expanded there."""
    folder, prompts, logits, _ = case
    model = with_tensors(load_model(folder).model)
    context = windows_context(1, len(prompts[0]))
    hidden = model(torch.tensor(prompts[0]), context)
    ours = model.compute_logits(hidden, context)
    assert largest_difference([ours], logits[:1]) < TOLERANCE


def test_64_greedy_tokens(case, driver):
    folder, prompts, _, model = case
    tokens = torch.tensor([prompts[2]])
    with torch.no_grad():
        theirs = model.generate(tokens, max_new_tokens=64, do_sample=False, eos_token_id=None)
    assert driver(folder).greedy(prompts[2:], 64) == [theirs[0, 41:].tolist()]


@pytest.mark.parametrize(
    "change",
    [
        {"rope_interleave": False},
        {"routed_scaling_factor": 1.5},
        {"topk_group": 4},
        {"rope_parameters.mscale_all_dim": 0.9},
    ],
)
def test_a_wrong_config_shows(change, driver, tmp_path):
    model = make_model("deepseek-v3")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = list(range(3, 60))
    with torch.no_grad():
        theirs = model(torch.tensor([prompt])).logits[0]
    assert largest_difference(driver(tmp_path).logits([prompt]), [theirs]) > 10 * TOLERANCE


def test_a_config_is_written_as_it_was_read(case):
    folder, *_ = case
    values = json.loads((folder / "config.json").read_text())
    config = config_from_hf(values, path=folder / "config.json")
    again = config_from_hf(hf_config(config, "F32"), path=folder / "config.json")
    assert config.differences(again) == []


def in_fp8(source: Path, out: Path) -> Path:
    """The folder with its projections in FP8, with a scale for each block of 128 by 128, as V3's
    own are published."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "proj" in name and tensors[name].ndim == 2]:
        weight = tensors[name]
        rows, columns = (-(-size // 128) for size in weight.shape)
        scales = torch.empty(rows, columns)
        coded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                scales[i, j] = weight[block].abs().max() / 448
                coded[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = coded, scales
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return out


def test_weights_of_fp8_blocks(driver, native_driver, tmp_path):
    make_model("deepseek-v3").save_pretrained(tmp_path / "plain")
    folder = in_fp8(tmp_path / "plain", tmp_path / "fp8")
    prompts = [list(range(3, 50)), [5, 6]]
    plain, exact = (driver(path).logits(prompts) for path in (tmp_path / "plain", folder))
    assert largest_difference(plain, exact) > 10 * NATIVE_TOLERANCE
    native = native_driver(folder)
    attention = native.model.model.layers[0].self_attn
    assert attention.kv_b_proj.weight.value.is_quantized
    # Of what is quantized, the copy that latent attention multiplies with has 11 bits.
    assert largest_difference(native.logits(prompts), exact) < 20 * NATIVE_TOLERANCE


# ---- What is kept


def test_a_token_is_576_numbers_a_layer():
    config = config_from_hf(V2_LITE)
    assert {(kept.kind, kept.key_dim, kept.value_dim) for kept in config.kv_layers} == {
        ("latent", 512, 64)
    }
    per_layer = {
        dtype: kv_bytes_per_token(config, dtype) / config.num_layers
        for dtype in ("float32", "bfloat16", "float16", "int8", "fp8")
    }
    assert per_layer == {
        "float32": 576 * 4,
        "bfloat16": 576 * 2,
        "float16": 576 * 2,
        "int8": 576 + 8,  # a scale for each part
        "fp8": 576 + 8,
    }


@pytest.mark.parametrize("dtype", ["int4", "k8v4"])
def test_types_in_which_latents_are_not_kept(dtype):
    with pytest.raises(ConfigError, match=f"KV of {dtype} is for keys and values.*choose .*int8"):
        kv_bytes_per_token(config_from_hf(V2_LITE), dtype)


def test_yarn_scales_scores_and_not_rotations():
    config = config_from_hf(V2_LITE)
    assert config.rope.attention_factor == 1.0
    # 192^-0.5, by the square of 0.1 * 0.707 * ln 40 + 1
    assert config.attention_scale == pytest.approx(0.0721688 * 1.2608**2, rel=1e-4)


@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim"])
def test_sizes_that_cannot_be(name):
    with pytest.raises(ModelFileError, match=name):
        config_from_hf({**V2_LITE, name: 0}, path=Path("config.json"))


# ---- GGUF

GGUF_CASES = ["deepseek-v2", "deepseek-v3", "deepseek-v3-halves"]


def as_f32(matrix) -> GGMLType:
    return GGMLType.F32


@pytest.mark.parametrize("name", GGUF_CASES)
def test_there_and_back_is_the_same_model(name, tiny_hf, driver, tmp_path):
    source, out = tiny_hf(name), tmp_path / "model.gguf"
    export_gguf(out, open_checkpoint(source), as_f32)
    write_hf_folder(tmp_path / "folder", open_checkpoint(out))
    prompts = [list(range(3, 50))]
    ours, theirs = (driver(path).logits(prompts) for path in (tmp_path / "folder", source))
    assert largest_difference(ours, theirs) < TOLERANCE


def test_what_a_gguf_file_cannot_say(tiny_hf, tmp_path):
    checkpoint = open_checkpoint(tiny_hf("deepseek-v2-groups-yarn"))
    with pytest.raises(UnsupportedModelError, match="YaRN cannot multiply rotations"):
        export_gguf(tmp_path / "model.gguf", checkpoint, as_f32)


def test_methods_that_do_not_know_its_matrices_say_so(tiny_hf, tmp_path):
    folder = tiny_hf("deepseek-v2")
    checkpoint, tokenizer = open_checkpoint(folder), load_tokenizer(folder)
    with pytest.raises(ConfigError, match="has latent attention.*--method gguf"):
        make(checkpoint, tokenizer, tmp_path / "out", QuantizeRequest("rtn"))
    out = tmp_path / "model.gguf"
    make(checkpoint, tokenizer, out, QuantizeRequest("gguf", type="Q8_0", calibrate=False))
    assert {weight.type for weight in open_checkpoint(out).tensors.values()} >= {GGMLType.Q8_0}
