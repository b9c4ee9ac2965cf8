"""Tiny models of transformers with random weights, one for each switch that a config has.

The weights are larger than those of a fresh model, whose logits hardly depend on anything.
"""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

VOCAB = 199
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = [1.0 + 0.5 * i for i in range(8)]
SHORT = [1.0 + 0.1 * i for i in range(8)]


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **parameters}}


def two_ropes(**full):
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }
    }


# name: (model type, what differs from SIZES)
CASES = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("llama", rope("dynamic", factor=2.0)),
    "llama-yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-mscale": (
        "llama",
        rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=1.2,
            truncate=False,
            beta_fast=8.0,
            beta_slow=0.5,
        ),
    ),
    "llama-yarn-attention": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3),
    ),
    "llama-longrope-long": (
        "llama",
        rope(
            "longrope",
            original_max_position_embeddings=32,
            factor=4.0,
            long_factor=LONG,
            short_factor=SHORT,
        ),
    ),
    "llama-longrope-short": (
        "llama",
        rope(
            "longrope",
            original_max_position_embeddings=128,
            factor=4.0,
            long_factor=LONG,
            short_factor=SHORT,
        ),
    ),
    "llama-llama3": (
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-bias-tied": (
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 40,
            **two_ropes(),
        },
    ),
    "gemma3-linear-softcap": (
        "gemma3_text",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": 5.0,
            **two_ropes(rope_type="linear", factor=8.0),
        },
    ),
}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2}
QWEN_EXPERTS = {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 48}
# The same of models with experts.
EXPERT_CASES = {
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": 24}),
    "mixtral-odd": ("mixtral", {**EXPERTS, "num_local_experts": 5, "intermediate_size": 33}),
    "qwen2-moe": ("qwen2_moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 80}),
    "qwen2-moe-mixed": (
        "qwen2_moe",
        {
            **QWEN_EXPERTS,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3-moe": ("qwen3_moe", {**QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-step": (
        "qwen3_moe",
        {**QWEN_EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "num_experts_per_tok": 4},
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            "head_dim": 32,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm4-moe-groups": (
        "glm4_moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
        },
    ),
    "olmoe": ("olmoe", {**QWEN_EXPERTS}),
    "olmoe-odd": ("olmoe", {**QWEN_EXPERTS, "num_attention_heads": 2, "intermediate_size": 35}),
    "granite-moe": (
        "granitemoe",
        {
            **EXPERTS,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
    ),
    "granite-moe-odd": (
        "granitemoe",
        {**EXPERTS, "num_local_experts": 3, "intermediate_size": 41, "tie_word_embeddings": True},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **EXPERTS,
            "head_dim": 32,
            "sliding_window": 24,
            **rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
        },
    ),
    "gpt-oss-odd": (
        "gpt_oss",
        {
            **EXPERTS,
            "head_dim": 16,
            "sliding_window": 16,
            "num_local_experts": 3,
            "intermediate_size": 50,
            "num_hidden_layers": 3,
        },
    ),
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0}
# The same of models with latent attention.
LATENT_CASES = {
    "deepseek-v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek-v2-groups-yarn": (
        "deepseek_v2",
        {
            **LATENT,
            **rope("yarn", **DEEPSEEK_YARN, mscale=0.7, mscale_all_dim=1.2),
            "kv_lora_rank": 26,
            "v_head_dim": 9,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **LATENT,
            **rope("yarn", **DEEPSEEK_YARN, mscale=1.0, mscale_all_dim=1.0),
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
        },
    ),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {
            **LATENT,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "first_k_dense_replace": 2,
        },
    ),
}

# The same of families that are not put to every test: two shapes of each, one with odd sizes.
GPT2_SIZES = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "intermediate_size": None,  # it has another name there
}
ODD = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2, "head_dim": 16}
ODD_HEADS = {
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
FAMILIES = {
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 40}),
    "gemma2-odd": (
        "gemma2",
        {
            **ODD,
            "sliding_window": 17,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": None,
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-longrope": (
        "phi3",
        {
            **ODD_HEADS,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 40,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0 + 0.1 * i for i in range(12)],
                "long_factor": [1.0 + 0.5 * i for i in range(12)],
            },
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-odd": (
        "granite",
        {
            **ODD_HEADS,
            "residual_multiplier": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.3,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-odd": ("olmo2", {**ODD, "num_key_value_heads": 1}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-odd": (
        "smollm3",
        {**ODD, "no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True},
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-odd": ("glm4", {**ODD, "head_dim": 32, "attention_bias": False}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 20, "logit_scale": 0.3}),
    "cohere2-odd": (
        "cohere2",
        {
            **ODD_HEADS,
            "sliding_window": 17,
            "sliding_window_pattern": 2,
            "num_hidden_layers": 3,
        },
    ),
    "mistral-small": ("mistral", {**ODD, "head_dim": 32, "sliding_window": None}),
    "qwen2-yarn": (
        "qwen2",
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-odd": (
        "starcoder2",
        {
            **ODD_HEADS,
            "use_bias": False,
            "sliding_window": 19,
        },
    ),
    "gpt2": ("gpt2", GPT2_SIZES),
    "gpt2-odd": (
        "gpt2",
        {
            **GPT2_SIZES,
            "n_embd": 48,
            "n_head": 3,
            "n_inner": 100,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt-odd": (
        "opt",
        {
            "hidden_size": 48,
            "ffn_dim": 100,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "word_embed_proj_dim": 48,
            "activation_function": "gelu",
        },
    ),
}


def make_model(name, **more):
    """A transformers model with random weights of a size that all of them matter."""
    cases = {**CASES, **FAMILIES, **EXPERT_CASES, **LATENT_CASES}
    kind, differences = cases[name]
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(kind, **{**SIZES, **differences, **more})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **eager).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[1] ** 0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model
