"""What a config leaves to the name of its kind: families of models, by ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from octavo.base.errors import UnsupportedModelError
from octavo.cost.hf_config import TextConfig
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
    Windows,
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
from octavo.cost.mixers import Mixer
from octavo.cost.mlps import Mlp
from octavo.cost.weight_shape import WeightShape

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFamily:
    """What a config leaves to the name of its kind.

    Args:
        norms: of the hidden size in each layer. norm_bias: these have one.
        final_norms: after (or before) all layers.
        is_gated: MLPs have two matrices that go up.
        bias_field: what says whether queries, keys and values have biases; it is ``qkv_bias``
            where the field is absent, or has no name.
        output_bias: of attention; None is like ``qkv_bias``.
        qk_norm: whether queries and keys are normed, each head by the same values or all by own.
        multi_query: one head of keys and values, unless ``multi_query`` says otherwise.
        mlp_bias, mlp_bias_field: as for queries; of experts, without a field.
        router_bias: see ``ExpertMlp``. has_output_gate, has_sinks: see ``Attention``.
        experts_per_token: where a config does not say.
        extra_positions: rows of learned positions beyond ``max_position_embeddings``; None
            where positions are not learned.
        tie: the head is the embedding, unless ``tie_word_embeddings`` says otherwise.
        windows, mixers, mlp: what makes the windows of all layers, and the parts of one.
        beside, inputs: other weights of a layer, and of the model before its layers.
        defaults: what a field means that is absent.
    """

    norms: int = 2
    norm_bias: bool = False
    final_norms: int = 1
    is_gated: bool = True
    qkv_bias: bool = False
    output_bias: bool | None = None
    bias_field: str = "attention_bias"
    mlp_bias: bool = False
    mlp_bias_field: str = "mlp_bias"
    head_bias: bool = False
    qk_norm: QkNorm | Callable[[TextConfig], QkNorm] = "none"
    multi_query: bool = False
    has_output_gate: bool = False
    has_sinks: bool = False
    router_bias: bool = False
    has_shared_gate: bool = False
    experts_per_token: int = 2
    extra_positions: int | None = None
    tie: bool = False
    windows: Callable[[TextConfig], Windows] = no_windows
    mixers: Callable[[TextConfig, int], tuple[Mixer, ...]] = attention
    mlp: Callable[[TextConfig, int], Mlp | None] = dense
    beside: Callable[[TextConfig, int], tuple[WeightShape, ...]] = lambda config, layer: ()
    inputs: Callable[[TextConfig], tuple[WeightShape, ...]] = lambda config: ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NormIfAsked:
    """``kind``, where the config says so in a field of this name."""

    name: str
    kind: QkNorm

    def __call__(self, config: TextConfig) -> QkNorm:
        return self.kind if config.flag(self.name, False) else "none"


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
    return ConfigFamily(**facts)


_LLAMA = ConfigFamily()
_GEMMA3 = ConfigFamily(
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
_QWEN3_NEXT = ConfigFamily(
    qk_norm="head",
    has_output_gate=True,
    has_shared_gate=True,
    mixers=delta_net_or_attention,
    mlp=qwen_experts,
)
_QWEN35 = ConfigFamily(qk_norm="head", has_output_gate=True, mixers=delta_net_or_attention)
_DEEPSEEK3 = ConfigFamily(mixers=latent_attention, mlp=deepseek_experts, router_bias=True)
_DEEPSEEK32 = ConfigFamily(mixers=selective_attention, mlp=deepseek_experts, router_bias=True)
_GRANITE_EXPERTS = ConfigFamily(mlp=experts_everywhere)
_LFM2 = ConfigFamily(
    qk_norm="head",
    tie=True,
    mixers=convolution_or_attention,
    mlp=lfm2_mlp,
    defaults={"max_position_embeddings": 128_000},
)
# These have no positions at all: any length will do.
_ENDLESS = {"max_position_embeddings": 1 << 20}
_MAMBA = ConfigFamily(norms=1, tie=True, mixers=mamba1, mlp=nothing, defaults=_ENDLESS)
_FALCON = ConfigFamily(
    norms=1,
    norm_bias=True,
    is_gated=False,
    tie=True,
    multi_query=True,
    bias_field="bias",
    mlp_bias_field="bias",
    defaults={"max_position_embeddings": 2048},
)
_FALCON_40B = ConfigFamily(
    norms=2,
    norm_bias=True,
    is_gated=False,
    tie=True,
    bias_field="bias",
    mlp_bias_field="bias",
    defaults={"max_position_embeddings": 2048},
)

FAMILIES: dict[str, ConfigFamily] = {
    "llama": _LLAMA,
    "mistral": ConfigFamily(windows=same_window),
    "ministral": ConfigFamily(windows=WindowsByType(1)),
    "mixtral": ConfigFamily(windows=same_window, mlp=experts_everywhere),
    "qwen2": ConfigFamily(qkv_bias=True, bias_field="", output_bias=False, windows=windows_if_used),
    "qwen2_moe": ConfigFamily(
        qkv_bias=True,
        bias_field="qkv_bias",
        output_bias=False,
        has_shared_gate=True,
        windows=windows_if_used,
        mlp=qwen_experts,
    ),
    "qwen3": ConfigFamily(qk_norm="head", windows=windows_if_used, defaults={"head_dim": 128}),
    "qwen3_moe": ConfigFamily(qk_norm="head", windows=windows_if_used, mlp=qwen_experts),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN3_NEXT,
    "gemma": ConfigFamily(tie=True),
    "gemma2": ConfigFamily(norms=4, tie=True, windows=WindowsByType(2, 4096)),
    "gemma3": _GEMMA3,
    "gemma3n": ConfigFamily(
        norms=4,
        tie=True,
        windows=WindowsByType(5, 512),
        mixers=gemma3n_attention,
        mlp=gemma3n_mlp,
        beside=gemma3n_beside,
        inputs=gemma3n_inputs,
        defaults={"max_position_embeddings": 32_768, "num_kv_shared_layers": 15},
    ),
    "gemma4": ConfigFamily(
        norms=4,
        tie=True,
        windows=WindowsByType(6, 512),
        mixers=gemma4_attention,
        mlp=gemma4_mlp,
        beside=gemma4_beside,
        inputs=gemma4_inputs,
        defaults={"max_position_embeddings": 131_072, "vocab_size": 262_144},
    ),
    "vaultgemma": ConfigFamily(tie=True, windows=WindowsByType(2, 4096)),
    "phi": _biased(norms=1, head_bias=True),
    "phi3": ConfigFamily(windows=same_window),
    "phimoe": ConfigFamily(
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
    "falcon_h1": ConfigFamily(mixers=mamba_beside_attention),
    "gptj": ConfigFamily(norms=1, norm_bias=True, is_gated=False, mlp_bias=True, head_bias=True),
    "mpt": ConfigFamily(is_gated=False, tie=True),
    "cohere": ConfigFamily(norms=1, tie=True, qk_norm=NormIfAsked("use_qk_norm", "full")),
    "cohere2": ConfigFamily(norms=1, tie=True, windows=WindowsByType(4, 4096)),
    "olmo": ConfigFamily(norms=0, final_norms=0),  # its norms have no weights
    "olmo2": ConfigFamily(qk_norm="full"),
    "olmo3": ConfigFamily(qk_norm="full", windows=WindowsByType(4)),
    "olmoe": ConfigFamily(qk_norm="full", mlp=experts_everywhere),
    "flex_olmo": ConfigFamily(qk_norm="full", mlp=experts_everywhere),
    "dots1": ConfigFamily(qk_norm="head", mlp=deepseek_experts, router_bias=True),
    "ernie4_5": ConfigFamily(tie=True, bias_field="use_bias", mlp_bias_field="use_bias"),
    "ernie4_5_moe": ConfigFamily(
        tie=True,
        bias_field="use_bias",
        mlp_bias_field="use_bias",
        router_bias=True,
        mlp=ernie_experts,
    ),
    "exaone_moe": ConfigFamily(
        qk_norm="head", windows=WindowsByType(4), mlp=deepseek_experts, router_bias=True
    ),
    "solar_open": ConfigFamily(mlp=deepseek_experts, router_bias=True),
    "afmoe": ConfigFamily(
        norms=4,
        qk_norm="head",
        has_output_gate=True,
        windows=WindowsByType(4),
        mlp=deepseek_experts,
        router_bias=True,
    ),
    "exaone4": ConfigFamily(qk_norm="head", windows=WindowsByType(4)),
    "hunyuan_v1_dense": ConfigFamily(qk_norm="head"),
    "hunyuan_v1_moe": ConfigFamily(qk_norm="head", mlp=hunyuan_experts),
    "jais2": _biased(bias_field="attention_bias", mlp_bias_field="mlp_bias"),
    "cwm": ConfigFamily(windows=WindowsByType(4)),
    "arcee": ConfigFamily(is_gated=False),
    "deepseek_v2": ConfigFamily(mixers=latent_attention, mlp=deepseek_experts),
    "deepseek_v3": _DEEPSEEK3,
    "kimi_k2": _DEEPSEEK3,
    "deepseek": ConfigFamily(mlp=deepseek_experts),
    "deepseek_v32": _DEEPSEEK32,
    "glm_moe_dsa": _DEEPSEEK32,
    "kimi_linear": ConfigFamily(
        mixers=kimi_delta_or_latent,
        mlp=deepseek_experts,
        router_bias=True,
        beside=kimi_beside,
    ),
    "minicpm3": ConfigFamily(mixers=latent_attention, tie=True),
    "youtu": ConfigFamily(mixers=latent_attention, tie=True),
    "dbrx": ConfigFamily(mlp=experts_everywhere),
    "chatglm": ConfigFamily(qkv_bias=True, bias_field="add_qkv_bias", output_bias=False),
    "glm": ConfigFamily(qkv_bias=True, output_bias=False),
    "glm4": ConfigFamily(norms=4, qkv_bias=True, output_bias=False),
    "glm4_moe": ConfigFamily(
        output_bias=False,
        qk_norm=NormIfAsked("use_qk_norm", "head"),
        mlp=deepseek_experts,
        router_bias=True,
    ),
    "glm4_moe_lite": _DEEPSEEK3,
    "gpt_oss": ConfigFamily(
        qkv_bias=True,
        mlp_bias=True,
        router_bias=True,
        has_sinks=True,
        windows=WindowsByType(2, 128),
        mlp=experts_everywhere,
    ),
    "llama4": ConfigFamily(
        windows=chunks_but_every_fourth, mlp=llama4_experts, experts_per_token=1
    ),
    "granite": _LLAMA,
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoeshared": _GRANITE_EXPERTS,
    "granitemoehybrid": ConfigFamily(mixers=mamba_or_attention, mlp=experts_or_dense),
    "bamba": ConfigFamily(mixers=mamba_or_attention),
    "jamba": ConfigFamily(mixers=mamba1_or_attention, mlp=jamba_experts),
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": ConfigFamily(norms=1, mixers=mamba2, mlp=nothing, defaults=_ENDLESS),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, mlp=deepseek_experts, router_bias=True),
    "minimax": ConfigFamily(mixers=lightning_or_attention, mlp=experts_everywhere),
    "nemotron": ConfigFamily(norm_bias=True, is_gated=False),
    "nemotron_h": ConfigFamily(
        norms=1, is_gated=False, router_bias=True, mixers=nemotron_mixer, mlp=nemotron_mlp
    ),
    "minimax_m2": ConfigFamily(qk_norm="full", mlp=experts_everywhere, router_bias=True),
    "seed_oss": ConfigFamily(qkv_bias=True, output_bias=False),
    "smollm3": _LLAMA,
    "stablelm": ConfigFamily(norm_bias=True, bias_field="use_qkv_bias", output_bias=False),
}
# Other names of the same: a text model that is part of one that sees, or of another company.
SAME = {
    "llama4_text": "llama4",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "exaone4_5_text": "exaone4",
    "phi4_multimodal": "phi3",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "exaone": "llama",
    "internlm2": "llama",
    "mistral3": "mistral",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k25": "deepseek_v3",
    "ministral3": "llama",
    "internlm3": "llama",
    "helium": "llama",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
}


def family_of(kind: str, values: Mapping[str, Any], path: Path) -> ConfigFamily:
    """By a config's ``model_type``, and what else it says. UnsupportedModelError with the nearest
    for kinds that are not known."""
    kind = SAME.get(kind, kind)
    if kind == "falcon" and values.get("new_decoder_architecture"):
        return _FALCON_40B
    if kind in FAMILIES:
        return FAMILIES[kind]
    near = get_close_matches(kind, FAMILIES, 3)
    raise UnsupportedModelError(
        f"{path}: models of type {kind!r:.80} cannot be planned"
        + (f"; do you mean {' or '.join(near)}?" if near else "")
    )
