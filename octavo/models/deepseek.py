"""DeepSeek V2 and V3, and models of their shape: Kimi K2, Moonlight, R1.

Latent attention (DeepSeek-V2, arXiv 2405.04434) in all layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.latent_config import LatentConfig
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.decoder import DecoderForCausalLM
from octavo.models.family import Family
from octavo.models.llama import HF_DEFAULTS


class DeepseekDecoderLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        assert config.latent is not None
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = LatentAttention(
            index,
            config.hidden_size,
            config.num_heads,
            config.latent,
            scale=config.attention_scale,
            interleaved_rope=config.rope.interleaved,
            bias=config.attention_bias,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias
        )

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.self_attn(self.input_layernorm(x, ctx), cos_sin, ctx)
        x = ctx.ops.add(x, attended)
        fed: Activations = self.mlp(self.post_attention_layernorm(x, ctx), ctx)
        return ctx.ops.add(x, fed)


class DeepseekForCausalLM(DecoderForCausalLM):
    layer_type = DeepseekDecoderLayer


# -- files ----------------------------------------------------------------------------------------


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    """Sizes of heads have names of their own: ``head_dim`` is what of a head is rotated."""
    latent = LatentConfig(
        q_rank=fields.integer("q_lora_rank", None),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )
    scaling = fields.table("rope_parameters", {}) or fields.table("rope_scaling", {})
    weight = Fields(fields.path, scaling).number("mscale_all_dim", 0.0, above=-1.0)
    return {
        "num_kv_heads": config.num_heads,
        "head_dim": latent.query_dim,
        "latent": latent,
        "rope": replace(config.rope, interleaved=fields.boolean("rope_interleave", True)),
        "attention_scale": latent.query_dim**-0.5 * _strength(config, weight) ** 2,
    }


def _strength(config: ModelConfig, weight: float) -> float:
    """YaRN's factor for scores: DeepSeek puts it into their scale, and leaves rotations alone."""
    rope = config.rope
    if rope.scaling == "default" or rope.factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(rope.factor) + 1.0


def _weight_of_strength(config: ModelConfig) -> float:
    """The other way: ``mscale_all_dim``."""
    if config.rope.factor <= 1:
        return 0.0
    strength = math.sqrt(config.attention_scale * config.head_dim**0.5)
    return (strength - 1.0) / (0.1 * math.log(config.rope.factor))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    latent, rope = config.latent, config.rope
    assert latent is not None
    entries: dict[str, Any] = {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": rope.interleaved,
        "partial_rotary_factor": 1.0,
    }
    if rope.scaling == "yarn":
        entries["rope_scaling"] = {
            "type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "mscale_all_dim": _weight_of_strength(config),
        }
    return entries


_HF_DEFAULTS = {
    **HF_DEFAULTS,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    model=DeepseekForCausalLM,
    hf_interleaved=True,
    hf_fields={"head_dim": "qk_rope_head_dim"},
    hf_defaults={**_HF_DEFAULTS, "max_position_embeddings": 2048},
    from_hf=_from_hf,
    to_hf=_to_hf,
)
DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    model=DeepseekForCausalLM,
    hf_interleaved=True,
    hf_fields={"head_dim": "qk_rope_head_dim"},
    hf_defaults={**_HF_DEFAULTS, "max_position_embeddings": 4096},
    from_hf=_from_hf,
    to_hf=_to_hf,
)
