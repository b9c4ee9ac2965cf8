"""Tiny models of transformers with recurrent layers, and random weights."""

from __future__ import annotations

import torch
from tiny_transformers import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

CASES = {
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 8,
            "conv_bias": True,
        },
    ),
    "lfm2-odd": (
        "lfm2",
        {
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "layer_types": ["conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 4,
        },
    ),
    "granite": (
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "granite-odd": (
        "granitemoehybrid",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 52,
            "mamba_n_heads": 3,
            "mamba_expand": 1,
            "mamba_d_state": 11,
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "granite-experts": (
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_hidden_layers": 2,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "shared_intermediate_size": 24,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
        },
    ),
    "falcon": (
        "falcon_h1",
        {
            "head_dim": 32,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.4,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.6,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.5,
            "ssm_multipliers": [0.7, 0.9, 1.2, 1.4, 0.6],
            "mlp_multipliers": [0.9, 0.6],
        },
    ),
    "falcon-odd": (
        "falcon_h1",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "mamba_d_ssm": 44,
            "mamba_n_heads": 4,
            "mamba_n_groups": 1,
            "mamba_d_state": 11,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-next-experts": (
        "qwen3_next",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [0, 1, 2],
        },
    ),
    "qwen3-next-odd": (
        "qwen3_next",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 20,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 9,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [0, 1, 2],
            "partial_rotary_factor": 0.5,
        },
    ),
}

# Cases of which there are GGUF files that llama.cpp runs: what it cannot is left out of some.
GGUF_CASES = {
    "lfm2": {"conv_bias": False},
    "granite": {},
    "granite-experts": {},
    "falcon": {},
    "falcon-odd": {"mamba_conv_bias": True, "mamba_n_groups": 2},
    "qwen3-next-experts": {},
}


def make_model(name, **more):
    kind, changes = CASES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes, **more})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **eager).eval()
    for key, parameter in model.named_parameters():
        if "A_log" not in key and "dt_bias" not in key:
            spread = 0.15 if parameter.dim() > 1 else 0.1
            torch.nn.init.normal_(parameter, mean=parameter.data.mean().item(), std=spread)
    return model.float()
