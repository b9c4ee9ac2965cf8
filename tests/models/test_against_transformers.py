"""Logits of random checkpoints, as transformers saves them, against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_transformers import CASES, VOCAB, make_model
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4


def make_prompts(count=20, shortest=64, longest=96):
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def reference_logits(model, prompts):
    """One prompt at a time, so that no padding is involved."""
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def largest_difference(ours, theirs):
    """And a check that the best token is the same, where it is not a matter of rounding."""
    difference = 0.0
    for a, b in zip(ours, theirs, strict=True):
        difference = max(difference, (a - b).abs().max().item())
        top = b.topk(2).values
        clear = top[:, 0] - top[:, 1] > 1e-3
        assert torch.equal(a.argmax(-1)[clear], b.argmax(-1)[clear])
    return difference


@pytest.mark.parametrize("name", CASES)
def test_logits_agree(name, driver, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    prompts = make_prompts()
    difference = largest_difference(
        driver(tmp_path).logits(prompts), reference_logits(model, prompts)
    )
    assert difference < TOLERANCE


# Heads of 24 values are not native.
@pytest.mark.parametrize("name", [name for name in CASES if name != "llama-wide-heads"])
def test_native_logits_agree(name, native_driver, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    prompts = make_prompts()
    difference = largest_difference(
        native_driver(tmp_path).logits(prompts), reference_logits(model, prompts)
    )
    assert difference < TOLERANCE


# What must show if it were wrong: the comparison above is worth what this one is.
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_theta": 11_000.0}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama-gelu", {"hidden_act": "gelu_new"}),
        ("llama-yarn", {"rope_scaling.attention_factor": 1.15}),
        ("llama-llama3", {"rope_scaling.high_freq_factor": 4.5}),
        ("llama-longrope-long", {"max_position_embeddings": 32}),
        ("mistral-window", {"sliding_window": 17}),
        ("qwen2-window", {"max_window_layers": 2}),
        ("gemma3", {"sliding_window": 25}),
        ("gemma3", {"query_pre_attn_scalar": 41}),
        ("gemma3", {"rope_local_base_freq": 110.0}),
    ],
)
def test_a_wrong_config_shows(name, change, driver, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    config = old_spelling(json.loads((tmp_path / "config.json").read_text()))
    for key, value in change.items():
        section, _, field = key.rpartition(".")
        (config[section] if section else config)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = make_prompts(4)
    ours, theirs = driver(tmp_path).logits(prompts), reference_logits(model, prompts)
    worst = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    assert worst > 10 * TOLERANCE


def old_spelling(config):
    """A config of transformers 5 as transformers 4 wrote it."""
    config = dict(config)
    config["torch_dtype"] = config.pop("dtype")
    layer_types = config.pop("layer_types", None)
    if layer_types and config["model_type"] == "gemma3_text":
        config["sliding_window_pattern"] = layer_types.index("full_attention") + 1
    parameters = dict(config.pop("rope_parameters"))
    if "full_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = dict(parameters["full_attention"])
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    if kind != "default":
        # The oldest configs say type, and have no original length next to it.
        spelling = "rope_type" if len(parameters) > 1 else "type"
        config["rope_scaling"] = {spelling: kind, **parameters}
    return config


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-linear", "llama-yarn", "llama-llama3", "mistral-window", "qwen2", "gemma3"],
)
def test_old_spellings_mean_the_same(name, driver, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    prompts = make_prompts(2)
    new = driver(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(old_spelling(json.loads(path.read_text()))))
    old = driver(tmp_path)
    assert old.config == new.config
    for a, b in zip(old.logits(prompts), new.logits(prompts), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3"])
def test_sharded_checkpoints(name, driver, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompts = make_prompts(3)
    difference = largest_difference(
        driver(tmp_path).logits(prompts), reference_logits(model, prompts)
    )
    assert difference < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_16_bits_are_computed_with_in_float32(dtype, driver, tmp_path):
    model = make_model("llama").to(dtype)
    model.save_pretrained(tmp_path)
    ours = driver(tmp_path)
    assert ours.model.model.layers[0].mlp.up_proj.weight.value.dtype == dtype
    prompts = make_prompts(5)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    difference = largest_difference(ours.logits(prompts), reference_logits(theirs, prompts))
    assert difference < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_activations_in_16_bits(name, dtype, driver, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    prompts = make_prompts(3)
    ours, exact = driver(tmp_path, dtype=dtype).logits(prompts), reference_logits(model, prompts)
    theirs = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), prompts)

    def error(logits):
        return sum(((a - b) ** 2).mean() for a, b in zip(logits, exact, strict=True)) ** 0.5

    # As good as another implementation in that dtype.
    assert error(ours) < 1.2 * error(theirs)


GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def test_dynamic_scaling_beyond_the_trained_length(driver, tmp_path):
    # transformers gives decoded tokens the base of their own length too, one by one.
    model = make_model("llama-dynamic", max_position_embeddings=40)
    model.save_pretrained(tmp_path)
    ours = driver(tmp_path)
    assert ours.config.max_position == 80
    for prompt in make_prompts(3, 20, 30):
        ids = torch.tensor([prompt])
        everything = torch.ones_like(ids)
        answer = model.generate(ids, attention_mask=everything, max_new_tokens=40, **GREEDY)
        assert ours.greedy([prompt], 40) == [answer[0, len(prompt) :].tolist()]


def test_the_text_part_of_a_model_that_sees(driver, tmp_path):
    model = make_model("gemma3")
    text = model.state_dict()
    text.pop("lm_head.weight")
    config = json.loads(model.config.to_json_string(use_diff=False))
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    config.pop("architectures", None)
    prompts = make_prompts(2)
    theirs = reference_logits(model, prompts)
    for prefix in ("language_model.model.", "model.language_model."):
        from safetensors.torch import save_file

        tensors = {key.replace("model.", prefix, 1): value for key, value in text.items()}
        tensors["vision_tower.vision_model.x.weight"] = torch.zeros(3)
        tensors["model.multi_modal_projector.y"] = torch.zeros(3)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(outer))
        assert largest_difference(driver(tmp_path).logits(prompts), theirs) < TOLERANCE


def test_greedy_decoding_is_what_a_whole_prompt_gives(driver, tmp_path):
    model = make_model("gemma3")
    model.save_pretrained(tmp_path)
    ours, prompts = driver(tmp_path), make_prompts(3, 5, 40)
    for prompt, output in zip(prompts, ours.greedy(prompts, 30), strict=True):
        whole = ours.logits([prompt + output])[0]
        assert whole[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_logits_agree_on_cuda(name, driver, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    prompts = make_prompts(4)
    ours = driver(tmp_path, device="cuda").logits(prompts)
    assert largest_difference(ours, reference_logits(model, prompts)) < 1e-3
