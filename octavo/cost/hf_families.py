"""Families that octavo can plan and not run: the facts that their configs leave out.

They are here by their own ``model_type``; all names by which configs ask for a family are in
`octavo.models.registry`. Families that run say the same by their modules (`spec_of_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.cost import hf_gemma
from octavo.cost import hf_layers as layers
from octavo.cost import hf_recurrences as recurrences
from octavo.cost.hf_config import ConfigFamily, QkNorm, TextConfig


@dataclass(frozen=True, slots=True)
class NormIfAsked:
    """``kind``, where the config says so in a field of this name."""

    name: str
    kind: QkNorm

    def __call__(self, config: TextConfig) -> QkNorm:
        return self.kind if config.flag(self.name, False) else "none"


def family_like(**facts: Any) -> ConfigFamily:
    """A family with attention to everything and one MLP in each layer, but for these facts."""
    usual: dict[str, Any] = {
        "windows": layers.no_windows,
        "mixers": layers.attention,
        "mlp": layers.dense,
    }
    return ConfigFamily(**{**usual, **facts})


def biased(**more: Any) -> ConfigFamily:
    """Facts of models like GPT-2: norms with biases, an MLP without a gate, biases everywhere."""
    facts: dict[str, Any] = {
        "norm_bias": True,
        "is_gated": False,
        "qkv_bias": True,
        "bias_field": "",
        "mlp_bias": True,
        **more,
    }
    return family_like(**facts)


USUAL = family_like()  # what a family is like of which layers.nothing else is said
_QWEN3_NEXT = family_like(
    qk_norm="head",
    has_output_gate=True,
    has_shared_gate=True,
    mixers=recurrences.delta_net_or_attention,
    mlp=layers.qwen_experts,
)
_QWEN35 = family_like(
    qk_norm="head", has_output_gate=True, mixers=recurrences.delta_net_or_attention
)
DEEPSEEK3 = family_like(
    mixers=layers.latent_attention, mlp=layers.deepseek_experts, router_bias=True
)
_DEEPSEEK32 = family_like(
    mixers=layers.selective_attention, mlp=layers.deepseek_experts, router_bias=True
)
_LFM2_MOE = family_like(
    qk_norm="head",
    tie=True,
    mixers=recurrences.convolution_or_attention,
    mlp=layers.deepseek_experts,
    router_bias=True,
    defaults={"max_position_embeddings": 128_000},
)
# These have no positions at all: any length will do.
_ENDLESS = {"max_position_embeddings": 1 << 20}
_MAMBA = family_like(
    norms=1, tie=True, mixers=recurrences.mamba1, mlp=layers.nothing, defaults=_ENDLESS
)
_FALCON = family_like(
    norms=1,
    norm_bias=True,
    is_gated=False,
    tie=True,
    multi_query=True,
    bias_field="bias",
    mlp_bias_field="bias",
    defaults={"max_position_embeddings": 2048},
)
_FALCON_40B = replace(_FALCON, norms=2, multi_query=False)

FAMILIES: dict[str, ConfigFamily] = {
    "ministral": family_like(windows=layers.WindowsByType(1)),
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN3_NEXT,
    "gemma": family_like(tie=True),
    "gemma3n": family_like(
        norms=4,
        has_last_norm=True,
        tie=True,
        windows=layers.WindowsByType(5, 512),
        mixers=hf_gemma.gemma3n_attention,
        mlp=hf_gemma.gemma3n_mlp,
        beside=hf_gemma.gemma3n_beside,
        inputs=hf_gemma.gemma3n_inputs,
        defaults={"max_position_embeddings": 32_768, "num_kv_shared_layers": 15},
    ),
    "gemma4": family_like(
        norms=4,
        has_last_norm=True,
        tie=True,
        windows=layers.WindowsByType(6, 512),
        mixers=hf_gemma.gemma4_attention,
        mlp=hf_gemma.gemma4_mlp,
        beside=hf_gemma.gemma4_beside,
        inputs=hf_gemma.gemma4_inputs,
        defaults={"max_position_embeddings": 131_072, "vocab_size": 262_144},
    ),
    "vaultgemma": family_like(tie=True, windows=layers.WindowsByType(2, 4096)),
    "phi": biased(norms=1, head_bias=True),
    "phimoe": family_like(
        norm_bias=True,
        head_bias=True,
        windows=layers.same_window,
        mlp=layers.experts_everywhere,
    ),
    "gpt_bigcode": biased(tie=True, extra_positions=0, multi_query=True),
    "gpt_neox": biased(bias_field="attention_bias"),
    "bloom": biased(tie=True, final_norms=2, defaults={"max_position_embeddings": 2048}),
    "falcon": _FALCON,
    "gptj": family_like(norms=1, norm_bias=True, is_gated=False, mlp_bias=True, head_bias=True),
    "mpt": family_like(is_gated=False, tie=True),
    "cohere": family_like(norms=1, tie=True, qk_norm=NormIfAsked("use_qk_norm", "full")),
    "olmo": family_like(norms=0, final_norms=0),  # its norms have no weights
    "flex_olmo": family_like(has_last_norm=True, qk_norm="full", mlp=layers.experts_everywhere),
    "dots1": family_like(qk_norm="head", mlp=layers.deepseek_experts, router_bias=True),
    "ernie4_5": family_like(tie=True, bias_field="use_bias", mlp_bias_field="use_bias"),
    "ernie4_5_moe": family_like(
        tie=True,
        bias_field="use_bias",
        mlp_bias_field="use_bias",
        router_bias=True,
        mlp=layers.ernie_experts,
    ),
    "exaone_moe": family_like(
        qk_norm="head",
        windows=layers.WindowsByType(4),
        mlp=layers.deepseek_experts,
        router_bias=True,
    ),
    "solar_open": family_like(mlp=layers.deepseek_experts, router_bias=True),
    "afmoe": family_like(
        norms=4,
        has_last_norm=True,
        qk_norm="head",
        has_output_gate=True,
        windows=layers.WindowsByType(4),
        mlp=layers.deepseek_experts,
        router_bias=True,
    ),
    "exaone4": family_like(has_last_norm=True, qk_norm="head", windows=layers.WindowsByType(4)),
    "hunyuan_v1_dense": family_like(qk_norm="head"),
    "hunyuan_v1_moe": family_like(qk_norm="head", mlp=layers.hunyuan_experts),
    "jais2": biased(bias_field="attention_bias", mlp_bias_field="mlp_bias"),
    "cwm": family_like(windows=layers.WindowsByType(4)),
    "arcee": family_like(is_gated=False),
    "deepseek": family_like(mlp=layers.deepseek_experts),
    "deepseek_v32": _DEEPSEEK32,
    "glm_moe_dsa": _DEEPSEEK32,
    "kimi_linear": family_like(
        mixers=recurrences.kimi_delta_or_latent,
        mlp=layers.deepseek_experts,
        router_bias=True,
        beside=recurrences.kimi_beside,
    ),
    "minicpm3": family_like(mixers=layers.latent_attention, tie=True),
    "youtu": family_like(mixers=layers.latent_attention, tie=True),
    "dbrx": family_like(mlp=layers.experts_everywhere),
    "chatglm": family_like(qkv_bias=True, bias_field="add_qkv_bias", output_bias=False),
    "glm": family_like(qkv_bias=True, output_bias=False),
    "glm4_moe_lite": DEEPSEEK3,
    "llama4": family_like(
        windows=layers.chunks_but_every_fourth, mlp=layers.llama4_experts, experts_per_token=1
    ),
    "granitemoeshared": family_like(mlp=layers.experts_everywhere),
    "bamba": family_like(mixers=recurrences.mamba_or_attention),
    "jamba": family_like(mixers=recurrences.mamba1_or_attention, mlp=layers.jamba_experts),
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": family_like(
        norms=1, mixers=recurrences.mamba2, mlp=layers.nothing, defaults=_ENDLESS
    ),
    "lfm2_moe": _LFM2_MOE,
    "minimax": family_like(
        mixers=recurrences.lightning_or_attention, mlp=layers.experts_everywhere
    ),
    "nemotron": family_like(norm_bias=True, is_gated=False),
    "nemotron_h": family_like(
        norms=1,
        is_gated=False,
        router_bias=True,
        mixers=recurrences.nemotron_mixer,
        mlp=layers.nemotron_mlp,
    ),
    "minimax_m2": family_like(qk_norm="full", mlp=layers.experts_everywhere, router_bias=True),
    "seed_oss": family_like(qkv_bias=True, output_bias=False),
    "stablelm": family_like(norm_bias=True, bias_field="use_qkv_bias", output_bias=False),
}


def family_of(kind: str, values: Mapping[str, Any]) -> ConfigFamily:
    """Find a family by its own ``model_type`` in `octavo.models.registry`, and by other fields of
    the config."""
    if kind == "falcon" and values.get("new_decoder_architecture"):
        return _FALCON_40B
    return FAMILIES[kind]
