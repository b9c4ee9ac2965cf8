"""Folders that were written, as octavo and transformers read them."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

from octavo.base.errors import ConfigError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig
from octavo.models.config_hf import config_from_hf
from octavo.models.config_to_hf import generation_config, hf_config
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.models.parameters import Parameters
from octavo.models.safetensors_writer import NewTensor, write_safetensors
from octavo.quantization.ggml_types import GGMLType

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

PROMPT = torch.arange(3, 60) * 37 % 199


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(PROMPT[None]).logits[0]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-biases", "llama-tied", "llama-linear", "llama-yarn", "llama-llama3"),
        *("llama-longrope-long", "mistral-window", "qwen2", "qwen2-window", "qwen3", "gemma3"),
        "gemma3-linear-softcap",
    ],
)
def test_transformers_reads_the_same_model(name, tiny_hf, tmp_path):
    """By way of octavo's config alone, in the spelling of transformers 4."""
    source = tiny_hf(name)
    write_hf_folder(tmp_path / "out", open_checkpoint(source))
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    read, written = (open_checkpoint(path).config() for path in (source, tmp_path / "out"))
    assert read.differences(written) == ["name"]


@pytest.mark.parametrize(
    "name", ["llama", "llama-biases", "llama-llama3", "qwen2", "qwen3", "gemma3"]
)
def test_a_gguf_file_becomes_the_folder_it_came_from(name, tiny_hf, tmp_path):
    """Rows of q and k, norms and divisors of rope are as transformers wants them again."""
    source = tiny_hf(name)
    export_gguf(tmp_path / "model.gguf", open_checkpoint(source), lambda matrix: GGMLType.F32)
    write_hf_folder(tmp_path / "out", open_checkpoint(tmp_path / "model.gguf"))
    difference = (logits(tmp_path / "out") - logits(source)).abs().max()
    assert difference < 1e-5
    before, after = (Parameters(open_checkpoint(path)) for path in (source, tmp_path / "out"))
    for parameter in before.names:
        if not parameter.endswith("norm.weight"):
            np.testing.assert_array_equal(before.rows(parameter), after.rows(parameter))


def test_what_transformers_calls_tied_is_written_once(tiny_hf, tmp_path):
    write_hf_folder(tmp_path / "out", open_checkpoint(tiny_hf("gemma3")))
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "out").tensors


def test_weights_of_16_bits(tiny_hf, tmp_path):
    source = tiny_hf("llama")
    write_hf_folder(tmp_path / "out", open_checkpoint(source), dtype=GGMLType.BF16)
    exact, rounded = (Parameters(open_checkpoint(path)) for path in (source, tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name in exact.names:
        expected = torch.from_numpy(exact.rows(name)).bfloat16().float().numpy()
        np.testing.assert_array_equal(rounded.rows(name), expected)


def test_rows_are_those_of_the_whole(tiny_hf, tmp_path):
    """A piece that begins inside a head of a file with neighbouring pairs is put in order too."""
    source = tiny_hf("llama-biases")
    export_gguf(tmp_path / "model.gguf", open_checkpoint(source), lambda matrix: GGMLType.F32)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    for name in ("weight", "bias"):
        name = f"model.layers.1.self_attn.k_proj.{name}"
        whole = Parameters(open_checkpoint(source)).rows(name)
        np.testing.assert_array_equal(Parameters(checkpoint).rows(name, 5, 23), whole[5:23])


def test_tensors_and_how_they_are_quantized(tiny_hf, tmp_path):
    """What somebody else made of the model, bit for bit, with types that octavo does not read."""
    codes = np.arange(24, dtype=np.int32).reshape(4, 6)
    scales = np.ones((4, 1), np.float16)
    tensors = [
        NewTensor("a.weight_packed", "I32", (4, 6), [codes[:3], codes[3:]]),
        NewTensor("a.weight_scale", "F16", (4, 1), [scales]),
    ]
    settings = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    write_hf_folder(
        tmp_path / "out",
        open_checkpoint(tiny_hf("llama")),
        iter(tensors),
        dtype=GGMLType.BF16,
        quantization_config=settings,
    )
    from safetensors.torch import load_file

    read = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(read["a.weight_packed"], torch.from_numpy(codes))
    assert torch.equal(read["a.weight_scale"], torch.from_numpy(scales))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == settings


def test_nothing_is_left_of_a_folder_that_failed(tiny_hf, tmp_path):
    short = NewTensor("a", "F32", (4,), [np.zeros(3, np.float32)])
    with pytest.raises(ValueError, match="a has 12 bytes, not 16"):
        write_hf_folder(tmp_path / "out", open_checkpoint(tiny_hf("llama")), [short])
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(tiny_hf, tmp_path):
    """And nothing is made for it."""

    def never():
        raise AssertionError
        yield

    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not overwritten"):
        write_hf_folder(tmp_path, open_checkpoint(tiny_hf("llama")), never())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# -- shards ---------------------------------------------------------------------------------------


def random_tensors(count, seed=0):
    rng = np.random.default_rng(seed)
    for i in range(count):
        data = rng.standard_normal((i + 1, 8)).astype(np.float32)
        yield NewTensor(f"tensor.{i}", "F32", data.shape, [data])


def test_shards_are_full_and_complete(tmp_path):
    write_safetensors(tmp_path, random_tensors(12), max_shard_bytes=1000)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)  # which holds the index against the shards
    for tensor in random_tensors(12):
        read = checkpoint.read(tensor.name)
        assert read.floats().tobytes() == b"".join(chunk.tobytes() for chunk in tensor.chunks)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.num_bytes for t in random_tensors(12))
    shards = sorted(set(index["weight_map"].values()))
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    sizes = [checkpoint.tensors[name].num_bytes for name in index["weight_map"]]
    assert len(shards) == 3 and sum(sizes[:7]) <= 1000 < sum(sizes[:8])


def test_names_that_fill_the_header_begin_another_shard(tmp_path):
    one = np.ones(1, np.float32)
    names = ["x" * 100_000 + str(i) for i in range(3)]
    write_safetensors(tmp_path, (NewTensor(name, "F32", (1,), [one]) for name in names))
    (tmp_path / "config.json").write_text("{}")
    assert sorted(open_checkpoint(tmp_path).tensors) == names
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    with pytest.raises(ValueError, match="the name is too long"):
        write_safetensors(tmp_path, [NewTensor("x" * 300_000, "F32", (1,), [one])])


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    """The next one, and the next piece of one, are made once the last is in the file."""
    sizes = []

    def pieces():
        for _ in range(3):
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            yield np.zeros(1 << 16, np.float32)

    write_safetensors(
        tmp_path, (NewTensor(f"tensor.{i}", "F32", (3, 1 << 16), pieces()) for i in range(4))
    )
    assert (np.diff(sizes) >= 1 << 17).all()  # a file's buffer may hold some of the rest


def test_a_name_is_there_once(tmp_path):
    with pytest.raises(ValueError, match=r"tensor\.0 is there twice"):
        write_safetensors(tmp_path, [*random_tensors(1), *random_tensors(1)])


# -- configs --------------------------------------------------------------------------------------


def config_of(**changes) -> ModelConfig:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        **changes,
    }
    generation = {"temperature": 0.6, "top_k": 20, "eos_token_id": [7, 8], "do_sample": True}
    return config_from_hf(values, generation, path="folder/config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "partial_rotary_factor": 0.5},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True, "head_dim": 24},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 3,
        },
        {
            "architectures": ["Gemma3ForCausalLM"],
            "query_pre_attn_scalar": 168,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
        },
    ],
)
def test_a_config_comes_back_equal(changes):
    config = config_of(**changes, hidden_act="gelu", bos_token_id=5)
    written = json.loads(json.dumps(hf_config(config, "BF16")))
    generation = json.loads(json.dumps(generation_config(config)))
    assert config_from_hf(written, generation, path="folder/config.json") == config
    assert written["torch_dtype"] == "bfloat16"


def test_a_config_that_a_file_cannot_say():
    config = config_of(architectures=["Gemma3ForCausalLM"], num_hidden_layers=2)
    object.__setattr__(config, "qk_norm", False)
    with pytest.raises(UnsupportedModelError, match="cannot say its qk_norm"):
        hf_config(config, "F32")
