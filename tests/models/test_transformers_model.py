"""Models that octavo has no implementation of, run by transformers over our paged cache."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    CohereConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    OPTConfig,
    PhiConfig,
)

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError, ModelError, UnsupportedModelError
from tests.conftest import write_byte_tokenizer

SIZES = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
CASES = {
    "parallel, LayerNorm": GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "grouped heads, partial rope": PhiConfig(
        **SIZES, num_key_value_heads=2, partial_rotary_factor=0.5
    ),
    "squared relu": NemotronConfig(**SIZES, num_key_value_heads=2, head_dim=12),
    "scaled logits": CohereConfig(**SIZES, num_key_value_heads=2, logit_scale=0.25),
    "learned positions, decoder inside": OPTConfig(**SIZES, ffn_dim=80, word_embed_proj_dim=48),
    "experts, windows and sinks": GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=9,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "windows": MistralConfig(**SIZES, num_key_value_heads=2, head_dim=12, sliding_window=9),
}
PROMPTS = [[3, 7, 11, 200, 41] * 9, [5, 6] * 4, [3, 7, 11, 200, 41] * 7, [99]]
FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def folder(name, config):
        if name not in made:
            made[name] = path = tmp_path_factory.mktemp("model")
            torch.manual_seed(3)
            model = Auto.from_config(config).eval()
            for parameter in model.parameters():  # far from what they begin with, so that ...
                torch.nn.init.normal_(parameter, std=0.2)  # ... tokens depend on those before
            model.save_pretrained(path)
            write_byte_tokenizer(path)
        return made[name]

    return folder


def theirs(folder, prompts, count):
    model = Auto.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(count):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(name, folder_of):
    """With chunks of prompts, prefixes that are shared, and requests that are preempted."""
    folder = folder_of(name, CASES[name])
    num_blocks = 14 if "sinks" in name else 9  # layers of two kinds have tables of their own
    llm = LLM(
        str(folder),
        model_impl="transformers",
        max_num_batched_tokens=16,
        num_blocks=num_blocks,
        max_num_seqs=3,
        max_model_len=96,
    )
    answers = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], FREE)
    assert [a.outputs[0].token_ids for a in answers] == theirs(folder, PROMPTS, FREE.max_tokens)
    assert llm.engine_info()["kernels"] == "transformers"
    llm.close()


def test_a_family_of_octavos_answers_the_same_either_way(folder_of):
    folder = folder_of("llama", LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16))
    answers = []
    for impl in ("octavo", "transformers"):
        with LLM(str(folder), model_impl=impl, kv_cache_dtype="f32") as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], FREE)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_auto_takes_it_for_families_that_octavo_has_not(folder_of, caplog):
    folder = folder_of("parallel, LayerNorm", CASES["parallel, LayerNorm"])
    with LLM(str(folder)) as llm:
        assert llm.engine_info()["kernels"] == "transformers"
    assert "slower" in caplog.text
    with pytest.raises(UnsupportedModelError, match="GPTNeoX"):
        LLM(str(folder), model_impl="octavo")


def edited(folder, target, **changes):
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return str(target)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked"),
        ({"num_hidden_layers": 4}, "missing"),
        ({"model_type": "nothing-known"}, "nothing-known"),
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, "built in"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}, "model_type": "new"}, "new"),
    ],
)
def test_what_does_not_fit_is_refused(changes, told, folder_of, tmp_path):
    folder = folder_of("grouped heads, partial rope", CASES["grouped heads, partial rope"])
    with pytest.raises(ModelError, match=told):
        LLM(edited(folder, tmp_path, **changes), model_impl="transformers")


def test_rope_by_the_longest_of_a_batch_is_refused(folder_of, tmp_path):
    folder = folder_of("grouped heads, partial rope", CASES["grouped heads, partial rope"])
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        LLM(edited(folder, tmp_path, rope_parameters=rope), model_impl="transformers")


@pytest.mark.parametrize(
    ("setting", "told"),
    [({"kernels": "native"}, "kernels native"), ({"batch_invariant": True}, "batch_invariant")],
)
def test_what_needs_our_kernels_is_refused(setting, told, folder_of):
    folder = folder_of("windows", CASES["windows"])
    with pytest.raises(ConfigError, match=told):
        LLM(str(folder), model_impl="transformers", **setting)


def test_what_was_evicted_comes_back(folder_of):
    """From host memory, and with the same answer: where there is a store, the cache has host
    blocks."""
    folder = folder_of("squared relu", CASES["squared relu"])
    settings = {"model_impl": "transformers", "num_blocks": 9, "max_model_len": 96}
    prompts = [[3 + i, *range(60)] for i in range(3)]
    with LLM(str(folder), swap_space=0.01, **settings) as llm:
        first, _, _, again = (
            llm.generate([{"prompt_token_ids": p}], FREE)[0] for p in (*prompts, prompts[0])
        )
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.metrics.num_cached_tokens > 0


def test_a_gguf_file_is_no_model_of_transformers(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="GGUF"):
        LLM(str(tmp_path / "model.gguf"), model_impl="transformers")
