"""Llama 1 to 3, SmolLM 2, Mistral and Mixtral, Qwen 2 and Qwen 3 (dense), and the class of further
families.

One architecture with switches: biases of the projections (Qwen 2), norms of query and key heads
(Qwen 3), sliding windows (Mistral), experts (Mixtral), tied embeddings, scales (Granite), layers
without rope (SmolLM 3). The config has them all resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.models import experts as moe
from octavo.models.config import ModelConfig
from octavo.models.decoder import DecoderForCausalLM, add_scaled, make_attention, make_mlp
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.sliding_windows import (
    Windows,
    hf_window_entries,
    hf_windows,
    window_everywhere,
    window_size,
)


class LlamaDecoderLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        self.residual_scale = config.residual_scale
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = self.make_attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = make_mlp(config, index)

    @staticmethod
    def make_attention(config: ModelConfig, index: int) -> Module:
        return make_attention(
            config, index, qk_norm_eps=config.norm_eps if config.qk_norm else None
        )

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.self_attn(self.input_layernorm(x, ctx), cos_sin, ctx)
        x = add_scaled(x, attended, self.residual_scale, ctx)
        fed = self.mlp(self.post_attention_layernorm(x, ctx), ctx)
        return add_scaled(x, fed, self.residual_scale, ctx)


class LlamaForCausalLM(DecoderForCausalLM):
    layer_type = LlamaDecoderLayer


# -- files ----------------------------------------------------------------------------------------

GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs.weight": "model.rotary_emb.freq_factors",
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_NAMES = TensorNames(GGUF_TOP, GGUF_LAYER)
GGUF_EXPERT_NAMES = TensorNames(GGUF_TOP, {**GGUF_LAYER, **moe.GGUF_LAYER})

HF_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


def _llama_or_mistral(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    """Mistral's files are Llama's, but for windows, and Mixtral's but for experts."""
    experts = moe.from_gguf(fields, config, normalize=True)
    if experts is not None:
        return {"architecture": "MixtralForCausalLM", "experts": experts}
    return {"architecture": "MistralForCausalLM"} if any(config.layer_windows) else {}


def _mixtral_from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    """All that is between the products of an expert is what others call ``intermediate_size``."""
    experts = moe.from_hf(fields, config, inner="intermediate_size")
    return {**window_everywhere(fields, config), "experts": experts}


def qwen_windows(fields: Fields, config: ModelConfig) -> Windows:
    if not fields.boolean("use_sliding_window", False):
        return (None,) * config.num_layers
    first = fields.integer("max_window_layers", 28, minimum=0)
    return hf_windows(fields, config.num_layers, lambda layer: layer >= first)


def qwen_window_entries(config: ModelConfig) -> dict[str, Any]:
    windows = config.layer_windows
    return {
        **hf_window_entries(config),
        "use_sliding_window": window_size(config) is not None,
        "max_window_layers": next((i for i, w in enumerate(windows) if w), len(windows)),
    }


def _qwen2_from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    """Qwen 2 has biases of queries, keys and values whatever a config says, and none of the
    output."""
    return {
        "attention_bias": True,
        "attention_output_bias": False,
        "layer_windows": qwen_windows(fields, config),
    }


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    model=LlamaForCausalLM,
    next_token_layers=True,
    gguf="llama",
    gguf_names=GGUF_NAMES,
    gguf_interleaved=True,
    hf_defaults={**HF_DEFAULTS, "max_position_embeddings": 2048},
    from_gguf=_llama_or_mistral,
)
MISTRAL = replace(
    LLAMA,
    architecture="MistralForCausalLM",
    model_type="mistral",
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    from_hf=window_everywhere,
    to_hf=lambda config: {"sliding_window": window_size(config)},
)
_MIXTRAL_NAMES = {
    "block_sparse_moe.gate": "mlp.gate",
    "block_sparse_moe.experts.N.w1": "mlp.experts.N.gate_proj",
    "block_sparse_moe.experts.N.w3": "mlp.experts.N.up_proj",
    "block_sparse_moe.experts.N.w2": "mlp.experts.N.down_proj",
}
MIXTRAL = replace(
    LLAMA,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    next_token_layers=False,
    hf_names=HFNames(layer=_MIXTRAL_NAMES),
    gguf_names=GGUF_EXPERT_NAMES,
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    from_hf=_mixtral_from_hf,
    to_hf=lambda config: {
        **moe.to_hf(config, "num_local_experts"),
        "sliding_window": window_size(config),
    },
    to_gguf=moe.to_gguf,
)
QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    model=LlamaForCausalLM,
    next_token_layers=True,
    gguf="qwen2",
    gguf_names=GGUF_NAMES,
    hf_defaults={**HF_DEFAULTS, "max_position_embeddings": 32_768},
    from_hf=_qwen2_from_hf,
    to_hf=qwen_window_entries,
)
QWEN3 = replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    gguf="qwen3",
    hf_defaults={**HF_DEFAULTS, "max_position_embeddings": 32_768, "head_dim": 128},
    from_hf=lambda fields, config: {
        "qk_norm": True,
        "layer_windows": qwen_windows(fields, config),
    },
)
