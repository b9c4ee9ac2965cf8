"""Rotated models: the same function in every kind of file, better where a row has one scale."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import load_model
from safetensors.torch import load_file, save_file
from tiny_transformers import make_model
from transformers import AutoModelForCausalLM

from octavo.base.errors import ConfigError, ModelFileError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.models.loader import load_checkpoint
from octavo.models.parameters import Parameters
from octavo.quantization.ggml_types import GGMLType
from octavo.quantize.layerwise_model import LayerwiseModel
from octavo.quantize.methods import QuantizeRequest
from octavo.quantize.quantization_job import make
from octavo.quantize.rotation import RotatedCheckpoint
from octavo.sources.open import load_tokenizer
from tests.conftest import write_byte_tokenizer, write_tiny_model

PROMPT = torch.arange(3, 60) * 37 % 199
WINDOWS = torch.randint(256, (4, 48), generator=torch.Generator().manual_seed(5))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def transformers_logits(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(PROMPT[None]).logits[0]


def log_probabilities(model) -> torch.Tensor:
    running = LayerwiseModel(model, WINDOWS)
    for index in range(running.num_layers):
        running.run_layer(index, lambda name, x, weight: weight)
    logits = [running.logits(window) for window in range(len(WINDOWS))]
    return torch.cat(logits).log_softmax(dim=-1)


def divergence(exact: torch.Tensor, path) -> float:
    found = log_probabilities(load_model(path).model)
    return float((exact.exp() * (exact - found)).sum(dim=-1).mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tied Llama whose matrices have large weights for a few channels of the stream."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = write_tiny_model(tmp_path_factory.mktemp("sources") / "llama", **sizes, **heads)
    tensors = load_file(path / "model.safetensors")
    large = torch.ones(64)
    large[[3, 17, 40]] = 8.0
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] *= 0.3 * large
        if name.endswith(("v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensors[name] *= 0.5 * large
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.1
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def exact(folder) -> torch.Tensor:
    return log_probabilities(load_model(folder).model)


# -- the same function -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", {}),
        ("llama-biases", {}),
        ("llama-tied", {}),
        ("llama-one-kv-head", {}),
        ("llama-wide-heads", {}),
        ("llama-llama3", {}),
        ("mistral-window", {}),
        ("qwen2", {"hidden_size": 52, "head_dim": 16}),  # no Hadamard matrix has this order
        ("qwen3-bias-tied", {}),
    ],
)
def test_transformers_finds_the_same_function(name, changes, tmp_path):
    """Of an ordinary model, that nobody has to know to be rotated."""
    source = write_tiny_model(tmp_path / "source")
    (source / "model.safetensors").unlink()
    make_model(name, **changes).save_pretrained(source)
    rotated = RotatedCheckpoint(open_checkpoint(source))
    write_hf_folder(tmp_path / "out", rotated)
    logits, turned = transformers_logits(source), transformers_logits(tmp_path / "out")
    assert (turned - logits).abs().max() < 1e-4 * logits.abs().max()

    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert {*after} == {*before, HEAD}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        assert (after[f"model.layers.2.{norm}.weight"] == 1).all()
    assert (after["model.norm.weight"] == 1).all()
    for module in ("v_proj", "o_proj"):
        weight = f"model.layers.1.self_attn.{module}.weight"
        assert (after[weight] - before[weight]).abs().mean() > 0.1 * before[weight].abs().mean()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("into", ["folder", "gguf"])
def test_from_any_kind_of_file_to_any(kind, into, folder, exact, tmp_path):
    source = folder
    if kind == "gguf":
        source = tmp_path / "source.gguf"
        export_gguf(source, open_checkpoint(folder), lambda matrix: GGMLType.F32)
    rotated = RotatedCheckpoint(open_checkpoint(source))
    out = tmp_path / ("out.gguf" if into == "gguf" else "out")
    if into == "gguf":
        export_gguf(out, rotated, lambda matrix: GGMLType.F32)
    else:
        write_hf_folder(out, rotated)
    assert divergence(exact, out) < 1e-8
    assert load_tokenizer(out).encode("ab <eos>") == load_tokenizer(folder).encode("ab <eos>")
    assert not open_checkpoint(out).config().tie_embeddings


def test_it_is_run_as_it_is_read(folder, exact):
    """Embeddings are looked up by rows, matrices are made dense: both of the lazy weights."""
    rotated = RotatedCheckpoint(open_checkpoint(folder))
    found = log_probabilities(load_checkpoint(rotated, rotated.config()))
    assert float((exact.exp() * (exact - found)).sum(dim=-1).mean()) < 1e-8


@pytest.mark.parametrize("layout", ["hf", "gguf"])
def test_parts_of_a_matrix_are_those_of_the_whole(layout, folder):
    parameters = Parameters(RotatedCheckpoint(open_checkpoint(folder)), layout=layout)
    for name in parameters.names:
        whole = parameters.rows(name)
        middle = parameters.rows(name, 5, 9)
        np.testing.assert_allclose(middle, whole[5:9], rtol=1e-6, atol=1e-7)
        assert parameters.shape(name) == whole.shape and whole.dtype == np.float32


def test_rotations_are_drawn_by_the_seed(folder):
    checkpoint = open_checkpoint(folder)
    once, again, other = (Parameters(RotatedCheckpoint(checkpoint, seed)) for seed in (1, 1, 2))
    for name in (EMBEDDING, "model.layers.0.self_attn.v_proj.weight"):
        assert np.array_equal(once.rows(name), again.rows(name))
        assert np.abs(once.rows(name) - other.rows(name)).mean() > 0.05


# -- before methods --------------------------------------------------------------------------------


def quantized(source, out, method, **changes):
    changes = {"calibration_tokens": 512, **changes}
    wanted = QuantizeRequest(method, **changes)
    return make(open_checkpoint(source), load_tokenizer(source), out, wanted)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    "method, changes, bound",
    [
        ("rtn", {"bits": 8}, 0.01),
        ("gptq", {}, 0.5),
        ("awq", {}, 0.5),
        ("smoothquant", {}, 0.01),
        ("autoround", {}, 0.5),
        ("fp8", {}, 0.1),
        ("fp8", {"format": "fp8", "calibration_tokens": None}, 0.1),
        ("nf4", {}, 0.6),
        ("gguf", {"type": "Q8_0"}, 0.01),
    ],
)
def test_before_every_method(method, changes, bound, folder, exact, tmp_path):
    made = quantized(folder, tmp_path / "out.gguf", method, rotate=True, **changes)
    assert 0 < divergence(exact, made.out) < bound
    config = open_checkpoint(made.out).config()
    assert not config.tie_embeddings


def test_it_pays_where_a_row_has_one_scale(folder, exact, tmp_path):
    lost = {}
    for rotate in (False, True):
        out = tmp_path / f"out-{rotate}"
        made = quantized(folder, out, "gptq", group_size=-1, rotate=rotate)
        lost[rotate] = divergence(exact, made.out)
    assert lost[True] < 0.5 * lost[False]


def test_bits_count_the_second_copy_of_a_tied_matrix(folder, tmp_path):
    """Per weight of the model that was rotated: a head that was not there is no gain."""
    plain = quantized(folder, tmp_path / "plain", "rtn")
    rotated = quantized(folder, tmp_path / "rotated", "rtn", rotate=True)
    head = 260 * 64 * 2
    assert rotated.num_bytes == plain.num_bytes + head
    assert rotated.bits_per_weight / plain.bits_per_weight == pytest.approx(
        rotated.num_bytes / plain.num_bytes
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_stays_at_16_bits_keeps_its_type(dtype, folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write_byte_tokenizer(source)
    (source / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.to(dtype) for k, v in tensors.items()}, source / "model.safetensors")
    made = quantized(source, tmp_path / "out", "rtn", rotate=True)
    found = load_file(made.out / "model.safetensors")
    assert {found[name].dtype for name in (EMBEDDING, HEAD, "model.norm.weight")} == {dtype}


# -- what cannot be rotated ------------------------------------------------------------------------


def test_gemma_is_refused(tmp_path):
    source = write_tiny_model(tmp_path / "gemma")
    ids = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
    make_model("gemma3", **ids).save_pretrained(source)
    with pytest.raises(ConfigError, match="cannot be rotated.*follows attention and MLP"):
        quantized(source, tmp_path / "out", "rtn", rotate=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemma"]


def test_of_a_damaged_model_it_is_said_what_is_missing(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    del tensors[EMBEDDING]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"tensors are missing: {EMBEDDING}"):
        RotatedCheckpoint(open_checkpoint(tmp_path))


def test_of_what_is_quantized_the_reason_is_the_same(folder, tmp_path):
    once = quantized(folder, tmp_path / "once", "rtn", bits=8)
    with pytest.raises(ConfigError, match="is quantized already"):
        quantized(once.out, tmp_path / "twice", "rtn", rotate=True)
    made = quantized(once.out, tmp_path / "twice", "fp8", rotate=True, requantize=True)
    exact = log_probabilities(load_model(once.out).model)
    assert divergence(exact, made.out) < 0.1
