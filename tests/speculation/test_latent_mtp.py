"""MTP modules of models with latent attention: a layer of the target's own kind, with latents of
its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_heads import engine_of, requests, run

from octavo.kernels.cpu import library
from octavo.layers.module import named_parameters
from octavo.models.config_hf import config_from_hf
from octavo.models.registry import model_class
from tests.conftest import write_byte_tokenizer

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

LAYERS, HIDDEN = 2, 48
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 260,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "max_position_embeddings": 256,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Layers that say little beside the embedding, and a module that knows it: it reads the token,
    and says what the head makes of it."""
    folder = tmp_path_factory.mktemp("mtp") / "deepseek"
    folder.mkdir()
    rng = np.random.default_rng(0)
    config = config_from_hf({**CONFIG, "num_hidden_layers": LAYERS + 1})
    tensors = {}
    for name, parameter in named_parameters(model_class(config.architecture)(config)):
        values = rng.standard_normal(parameter.shape).astype(np.float32) * 0.2
        values = values if len(parameter.shape) == 2 else values + 1
        tensors[name] = values * (0.05 if "o_proj" in name or "down_proj" in name else 1)
    tensors["model.embed_tokens.weight"] *= 5
    module = f"model.layers.{LAYERS}."
    reads_token = np.concatenate([np.eye(HIDDEN), np.zeros((HIDDEN, HIDDEN))], axis=1)
    tensors[module + "eh_proj.weight"] = reads_token.astype(np.float32)
    for norm in ("enorm", "hnorm"):
        tensors[f"{module}{norm}.weight"] = np.ones(HIDDEN, np.float32)
    tensors[module + "shared_head.norm.weight"] = tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_byte_tokenizer(folder)
    return folder


def test_answers_are_those_without_and_drafts_are_good(model):
    plain = run(engine_of(model), requests())
    engine = engine_of(model, None, "mtp")
    drafted = run(engine, requests())
    assert drafted.token_ids == plain.token_ids
    # Of the first drafted token, where decoding is greedy.
    answers = {tuple(r.prompt_token_ids): plain.token_ids[r.request_id] for r in requests()[::2]}
    hits = []
    for known, draft in drafted.drafts:
        for prompt, answer in answers.items():
            at = len(known) - len(prompt)
            if tuple(known[: len(prompt)]) == prompt and at < len(answer):
                hits.append(draft.token_ids[0] == answer[at])
    assert len(hits) > 10 and np.mean(hits) > 0.5
