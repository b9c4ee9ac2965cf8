"""What configs leave to the name of their family, by its own ``model_type``.

The list of families, with all names by which configs ask for them, is `octavo.models.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.cost.hf_config import ConfigFamily, QkNorm, TextConfig
from octavo.cost.hf_gemma import (
    gemma3n_attention,
    gemma3n_beside,
    gemma3n_inputs,
    gemma3n_mlp,
    gemma4_attention,
    gemma4_beside,
    gemma4_inputs,
    gemma4_mlp,
)
from octavo.cost.hf_layers import (
    WindowsByType,
    attention,
    chunks_but_every_fourth,
    deepseek_experts,
    dense,
    ernie_experts,
    experts_everywhere,
    experts_or_dense,
    hunyuan_experts,
    jamba_experts,
    latent_attention,
    lfm2_mlp,
    llama4_experts,
    nemotron_mlp,
    no_windows,
    nothing,
    qwen_experts,
    same_window,
    selective_attention,
    windows_if_used,
)
from octavo.cost.hf_recurrences import (
    convolution_or_attention,
    delta_net_or_attention,
    kimi_beside,
    kimi_delta_or_latent,
    lightning_or_attention,
    mamba1,
    mamba1_or_attention,
    mamba2,
    mamba_beside_attention,
    mamba_or_attention,
    nemotron_mixer,
)


@dataclass(frozen=True, slots=True)
class NormIfAsked:
    """``kind``, where the config says so in a field of this name."""

    name: str
    kind: QkNorm

    def __call__(self, config: TextConfig) -> QkNorm:
        return self.kind if config.flag(self.name, False) else "none"


def _family(**facts: Any) -> ConfigFamily:
    """A family with attention to everything and one MLP in each layer, but for these facts."""
    usual: dict[str, Any] = {"windows": no_windows, "mixers": attention, "mlp": dense}
    return ConfigFamily(**{**usual, **facts})


def _biased(**more: Any) -> ConfigFamily:
    """Of the time of GPT-2: norms with biases, an MLP without a gate, biases everywhere."""
    facts: dict[str, Any] = {
        "norm_bias": True,
        "is_gated": False,
        "qkv_bias": True,
        "bias_field": "",
        "mlp_bias": True,
        **more,
    }
    return _family(**facts)


USUAL = _family()  # what a family is like of which nothing else is said
_GEMMA3 = _family(
    norms=4,
    qk_norm="head",
    tie=True,
    windows=WindowsByType(6, 4096),
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
)
_QWEN3_NEXT = _family(
    qk_norm="head",
    has_output_gate=True,
    has_shared_gate=True,
    mixers=delta_net_or_attention,
    mlp=qwen_experts,
)
_QWEN35 = _family(qk_norm="head", has_output_gate=True, mixers=delta_net_or_attention)
_DEEPSEEK3 = _family(mixers=latent_attention, mlp=deepseek_experts, router_bias=True)
_DEEPSEEK32 = _family(mixers=selective_attention, mlp=deepseek_experts, router_bias=True)
_GRANITE_EXPERTS = _family(mlp=experts_everywhere)
_LFM2 = _family(
    qk_norm="head",
    tie=True,
    mixers=convolution_or_attention,
    mlp=lfm2_mlp,
    defaults={"max_position_embeddings": 128_000},
)
# These have no positions at all: any length will do.
_ENDLESS = {"max_position_embeddings": 1 << 20}
_MAMBA = _family(norms=1, tie=True, mixers=mamba1, mlp=nothing, defaults=_ENDLESS)
_FALCON = _family(
    norms=1,
    norm_bias=True,
    is_gated=False,
    tie=True,
    multi_query=True,
    bias_field="bias",
    mlp_bias_field="bias",
    defaults={"max_position_embeddings": 2048},
)
_FALCON_40B = _family(
    norms=2,
    norm_bias=True,
    is_gated=False,
    tie=True,
    bias_field="bias",
    mlp_bias_field="bias",
    defaults={"max_position_embeddings": 2048},
)

FAMILIES: dict[str, ConfigFamily] = {
    "llama": USUAL,
    "mistral": _family(windows=same_window),
    "ministral": _family(windows=WindowsByType(1)),
    "mixtral": _family(windows=same_window, mlp=experts_everywhere),
    "qwen2": _family(qkv_bias=True, bias_field="", output_bias=False, windows=windows_if_used),
    "qwen2_moe": _family(
        qkv_bias=True,
        bias_field="qkv_bias",
        output_bias=False,
        has_shared_gate=True,
        windows=windows_if_used,
        mlp=qwen_experts,
    ),
    "qwen3": _family(qk_norm="head", windows=windows_if_used, defaults={"head_dim": 128}),
    "qwen3_moe": _family(qk_norm="head", windows=windows_if_used, mlp=qwen_experts),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN3_NEXT,
    "gemma": _family(tie=True),
    "gemma2": _family(norms=4, tie=True, windows=WindowsByType(2, 4096)),
    "gemma3_text": _GEMMA3,
    "gemma3n": _family(
        norms=4,
        tie=True,
        windows=WindowsByType(5, 512),
        mixers=gemma3n_attention,
        mlp=gemma3n_mlp,
        beside=gemma3n_beside,
        inputs=gemma3n_inputs,
        defaults={"max_position_embeddings": 32_768, "num_kv_shared_layers": 15},
    ),
    "gemma4": _family(
        norms=4,
        tie=True,
        windows=WindowsByType(6, 512),
        mixers=gemma4_attention,
        mlp=gemma4_mlp,
        beside=gemma4_beside,
        inputs=gemma4_inputs,
        defaults={"max_position_embeddings": 131_072, "vocab_size": 262_144},
    ),
    "vaultgemma": _family(tie=True, windows=WindowsByType(2, 4096)),
    "phi": _biased(norms=1, head_bias=True),
    "phi3": _family(windows=same_window),
    "phimoe": _family(
        norm_bias=True,
        head_bias=True,
        windows=same_window,
        mlp=experts_everywhere,
    ),
    "gpt2": _biased(tie=True, extra_positions=0),
    "gpt_bigcode": _biased(tie=True, extra_positions=0, multi_query=True),
    "gpt_neox": _biased(bias_field="attention_bias"),
    "opt": _biased(tie=True, extra_positions=2),
    "bloom": _biased(tie=True, final_norms=2, defaults={"max_position_embeddings": 2048}),
    "starcoder2": _biased(
        bias_field="use_bias", mlp_bias_field="use_bias", tie=True, windows=same_window
    ),
    "falcon": _FALCON,
    "falcon_h1": _family(mixers=mamba_beside_attention),
    "gptj": _family(norms=1, norm_bias=True, is_gated=False, mlp_bias=True, head_bias=True),
    "mpt": _family(is_gated=False, tie=True),
    "cohere": _family(norms=1, tie=True, qk_norm=NormIfAsked("use_qk_norm", "full")),
    "cohere2": _family(norms=1, tie=True, windows=WindowsByType(4, 4096)),
    "olmo": _family(norms=0, final_norms=0),  # its norms have no weights
    "olmo2": _family(qk_norm="full"),
    "olmo3": _family(qk_norm="full", windows=WindowsByType(4)),
    "olmoe": _family(qk_norm="full", mlp=experts_everywhere),
    "flex_olmo": _family(qk_norm="full", mlp=experts_everywhere),
    "dots1": _family(qk_norm="head", mlp=deepseek_experts, router_bias=True),
    "ernie4_5": _family(tie=True, bias_field="use_bias", mlp_bias_field="use_bias"),
    "ernie4_5_moe": _family(
        tie=True,
        bias_field="use_bias",
        mlp_bias_field="use_bias",
        router_bias=True,
        mlp=ernie_experts,
    ),
    "exaone_moe": _family(
        qk_norm="head", windows=WindowsByType(4), mlp=deepseek_experts, router_bias=True
    ),
    "solar_open": _family(mlp=deepseek_experts, router_bias=True),
    "afmoe": _family(
        norms=4,
        qk_norm="head",
        has_output_gate=True,
        windows=WindowsByType(4),
        mlp=deepseek_experts,
        router_bias=True,
    ),
    "exaone4": _family(qk_norm="head", windows=WindowsByType(4)),
    "hunyuan_v1_dense": _family(qk_norm="head"),
    "hunyuan_v1_moe": _family(qk_norm="head", mlp=hunyuan_experts),
    "jais2": _biased(bias_field="attention_bias", mlp_bias_field="mlp_bias"),
    "cwm": _family(windows=WindowsByType(4)),
    "arcee": _family(is_gated=False),
    "deepseek_v2": _family(mixers=latent_attention, mlp=deepseek_experts),
    "deepseek_v3": _DEEPSEEK3,
    "deepseek": _family(mlp=deepseek_experts),
    "deepseek_v32": _DEEPSEEK32,
    "glm_moe_dsa": _DEEPSEEK32,
    "kimi_linear": _family(
        mixers=kimi_delta_or_latent,
        mlp=deepseek_experts,
        router_bias=True,
        beside=kimi_beside,
    ),
    "minicpm3": _family(mixers=latent_attention, tie=True),
    "youtu": _family(mixers=latent_attention, tie=True),
    "dbrx": _family(mlp=experts_everywhere),
    "chatglm": _family(qkv_bias=True, bias_field="add_qkv_bias", output_bias=False),
    "glm": _family(qkv_bias=True, output_bias=False),
    "glm4": _family(norms=4, qkv_bias=True, output_bias=False),
    "glm4_moe": _family(
        output_bias=False,
        qk_norm=NormIfAsked("use_qk_norm", "head"),
        mlp=deepseek_experts,
        router_bias=True,
    ),
    "glm4_moe_lite": _DEEPSEEK3,
    "gpt_oss": _family(
        qkv_bias=True,
        mlp_bias=True,
        router_bias=True,
        has_sinks=True,
        windows=WindowsByType(2, 128),
        mlp=experts_everywhere,
    ),
    "llama4": _family(windows=chunks_but_every_fourth, mlp=llama4_experts, experts_per_token=1),
    "granite": USUAL,
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoeshared": _GRANITE_EXPERTS,
    "granitemoehybrid": _family(mixers=mamba_or_attention, mlp=experts_or_dense),
    "bamba": _family(mixers=mamba_or_attention),
    "jamba": _family(mixers=mamba1_or_attention, mlp=jamba_experts),
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": _family(norms=1, mixers=mamba2, mlp=nothing, defaults=_ENDLESS),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, mlp=deepseek_experts, router_bias=True),
    "minimax": _family(mixers=lightning_or_attention, mlp=experts_everywhere),
    "nemotron": _family(norm_bias=True, is_gated=False),
    "nemotron_h": _family(
        norms=1, is_gated=False, router_bias=True, mixers=nemotron_mixer, mlp=nemotron_mlp
    ),
    "minimax_m2": _family(qk_norm="full", mlp=experts_everywhere, router_bias=True),
    "seed_oss": _family(qkv_bias=True, output_bias=False),
    "smollm3": USUAL,
    "stablelm": _family(norm_bias=True, bias_field="use_qkv_bias", output_bias=False),
}


def family_of(kind: str, values: Mapping[str, Any]) -> ConfigFamily:
    """By the own ``model_type`` of a family in `octavo.models.registry`, and what else a config
    says."""
    if kind == "falcon" and values.get("new_decoder_architecture"):
        return _FALCON_40B
    return FAMILIES[kind]
