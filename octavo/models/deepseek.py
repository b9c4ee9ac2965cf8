"""DeepSeek V2 and V3, and models of their shape: Kimi K2, Moonlight, R1.

Latent attention (DeepSeek-V2, arXiv 2405.04434) in all layers. The first of them have one MLP, the
others experts, in groups, and an MLP beside them that all tokens use. V2 chooses experts by their
softmax; V3 by sigmoids and a correction (arXiv 2412.19437).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.latent_config import LatentConfig
from octavo.layers.module import Module
from octavo.models import experts as moe
from octavo.models.config import ExpertsConfig, ModelConfig
from octavo.models.config_to_hf import rope_entries
from octavo.models.decoder import DecoderForCausalLM
from octavo.models.family import Family, TensorNames
from octavo.models.gguf_latents import kv_b_halves
from octavo.models.ignored_keys import always, only
from octavo.models.llama import GGUF_LAYER, GGUF_TOP, HF_DEFAULTS, LlamaDecoderLayer


class DeepseekDecoderLayer(LlamaDecoderLayer):
    @staticmethod
    def make_attention(config: ModelConfig, index: int) -> Module:
        assert config.latent is not None
        return LatentAttention(
            index,
            config.hidden_size,
            config.num_heads,
            config.latent,
            scale=config.attention_scale,
            interleaved_rope=config.rope.interleaved,
            bias=config.attention_bias,
        )


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
        "experts": _experts_from_hf(fields, config),
        "rope": replace(config.rope, interleaved=fields.boolean("rope_interleave", True)),
        "attention_scale": latent.query_dim**-0.5 * _strength(config, weight) ** 2,
    }


def _experts_from_hf(fields: Fields, config: ModelConfig) -> ExpertsConfig | None:
    layers = range(config.num_layers)
    first = fields.integer("first_k_dense_replace", 0, minimum=0)
    every = fields.integer("moe_layer_freq", 1)
    has_experts = [index >= first and index % every == 0 for index in layers]
    if "n_routed_experts" not in fields or not any(has_experts):
        return None
    is_v3 = config.architecture == DEEPSEEK_V3.architecture
    is_grouped = is_v3 or fields.text("topk_method", "greedy") == "group_limited_greedy"
    return moe.from_hf_grouped(fields, config, has_experts, by_sigmoid=is_v3, is_grouped=is_grouped)


def _experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {"first_k_dense_replace": config.num_layers}
    routing = experts.routing
    v2_method = "greedy" if routing.num_groups == 1 else "group_limited_greedy"
    return {
        **moe.to_hf_grouped(config),
        "scoring_func": routing.scoring,
        "topk_method": "noaux_tc" if experts.correction else v2_method,
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
        **_experts_to_hf(config),
        "rope_interleave": rope.interleaved,
        "partial_rotary_factor": 1.0,
    }
    if rope.scaling == "yarn":
        scaling = rope_entries(rope, config.head_dim)["rope_scaling"]
        scaling["mscale_all_dim"] = _weight_of_strength(config)
        entries["rope_scaling"] = scaling
    return entries


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    """Sizes of heads are those of MQA over latents, where there are others for heads beside them;
    files from before that have only these."""
    query_dim = fields.integer("attention.key_length_mla", config.head_dim)
    rope_dim = config.rope.rotary_dim
    latent = LatentConfig(
        q_rank=fields.integer("attention.q_lora_rank", 0, minimum=0) or None,
        kv_rank=fields.integer("attention.kv_lora_rank"),
        nope_dim=query_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer(
            "attention.value_length_mla", fields.integer("attention.value_length")
        ),
        norm_eps=config.norm_eps,
    )
    experts = _experts_from_gguf(fields, config)
    is_v3 = experts is not None and experts.correction
    # A tenth of what folders have.
    weight = 10 * fields.number("rope.scaling.yarn_log_multiplier", 0.0, above=-1.0)
    return {
        "architecture": (DEEPSEEK_V3 if is_v3 else DEEPSEEK_V2).architecture,
        "num_kv_heads": config.num_heads,
        "head_dim": query_dim,
        "latent": latent,
        "experts": experts,
        "rope": replace(
            config.rope, attention_factor=fields.number("rope.scaling.attn_factor", 1.0)
        ),
        "attention_scale": query_dim**-0.5 * _strength(config, weight) ** 2,
    }


def _experts_from_gguf(fields: Fields, config: ModelConfig) -> ExpertsConfig | None:
    if not fields.integer("expert_count", 0, minimum=0):
        return None
    experts = moe.from_gguf_grouped(fields, config)
    return replace(experts, correction=experts.routing.scoring == "sigmoid")


def _to_gguf(config: ModelConfig) -> dict[str, Any]:
    latent, rope = config.latent, config.rope
    assert latent is not None
    entries: dict[str, Any] = {
        **_entries_of_halves(config),
        "attention.q_lora_rank": latent.q_rank or 0,  # llama.cpp infers it from layers
        "attention.kv_lora_rank": latent.kv_rank,
    }
    if config.experts is not None:
        entries |= moe.to_gguf_grouped(config)
    else:  # which llama.cpp asks for all the same
        entries["leading_dense_block_count"] = config.num_layers
        entries["expert_feed_forward_length"] = config.intermediate_size
        entries["expert_shared_count"] = 0
    if rope.scaling == "yarn":
        if rope.attention_factor != 1.0:  # llama.cpp would put it into the scores' scale, too
            raise UnsupportedModelError(
                f"{config.name}: in a GGUF file YaRN cannot multiply rotations by "
                f"{rope.attention_factor:g}, and leave scores alone"
            )
        entries["rope.scaling.attn_factor"] = 1.0
        entries["rope.scaling.yarn_log_multiplier"] = _weight_of_strength(config) / 10
    return entries


def _entries_of_halves(config: ModelConfig) -> dict[str, Any]:
    """Sizes as of MQA over what is kept of a token, and beside them those of heads. By these
    llama.cpp sees that keys and values are made by two tensors, and keeps latents alone."""
    latent = config.latent
    assert latent is not None
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": latent.kv_rank + latent.rope_dim,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": latent.query_dim,
        "attention.value_length_mla": latent.value_dim,
    }


_GGUF_LAYER = {
    **GGUF_LAYER,
    **moe.GGUF_LAYER,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of files from before 2025-04
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_GGUF_NAMES = TensorNames(GGUF_TOP, _GGUF_LAYER, joined={"self_attn.kv_b_proj": kv_b_halves()})


_HF_DEFAULTS = {
    **HF_DEFAULTS,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_HF_IGNORED = {
    "head_dim": always,
    "qk_head_dim": lambda value, values: (
        value == values.get("qk_nope_head_dim", 0) + values.get("qk_rope_head_dim", 0)
    ),
    "num_key_value_heads": always,
    # Of experts, where no layer has any.
    **dict.fromkeys(
        (
            *("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group"),
            *("topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor"),
        ),
        always,
    ),
}

# Of experts, where no layer has any.
_GGUF_IGNORED = dict.fromkeys(
    (
        *("leading_dense_block_count", "expert_feed_forward_length", "expert_shared_count"),
        *("expert_weights_scale", "expert_weights_norm", "expert_gating_func"),
    ),
    always,
)

DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    model=DeepseekForCausalLM,
    next_token_layers=True,
    hf_interleaved=True,
    hf_fields={"head_dim": "qk_rope_head_dim"},
    hf_defaults={**_HF_DEFAULTS, "max_position_embeddings": 2048},
    hf_ignored={
        **_HF_IGNORED,
        "scoring_func": only("softmax"),
        # Its routers go by the best ones alone, or take the best groups first.
        "n_group": always,
        "topk_group": always,
        "norm_topk_prob": only(False),
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    gguf="deepseek2",
    gguf_names=_GGUF_NAMES,
    written_gguf_entries=_entries_of_halves,
    gguf_interleaved=True,
    gguf_ignored=_GGUF_IGNORED,
    from_gguf=_from_gguf,
    to_gguf=_to_gguf,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    hf_defaults={**_HF_DEFAULTS, "max_position_embeddings": 4096},
    hf_ignored={
        **_HF_IGNORED,
        "scoring_func": only("sigmoid"),
        "topk_method": only("noaux_tc"),
    },
)
