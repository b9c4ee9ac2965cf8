"""gpt-oss: experts with biases and a gate of their own, attention with a sink in each head.

Every other layer sees a sliding window. Its experts come in MXFP4, gate and up in one tensor whose
rows are of the two in turn; checkpoints of floats have them turned besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.kernels.routing import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT
from octavo.layers.attention import Attention
from octavo.models import experts as moe
from octavo.models.config import ModelConfig
from octavo.models.decoder import DecoderForCausalLM, make_attention
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.ignored_keys import always, same_as
from octavo.models.llama import GGUF_LAYER, GGUF_TOP, HF_DEFAULTS, LlamaDecoderLayer
from octavo.models.sliding_windows import WindowPattern, hf_window_entries

_WINDOWS = WindowPattern(2)
_EXPERTS: dict[str, Any] = {
    "bias": True,
    "router_bias": True,
    "activation": CLAMPED_SWIGLU,
}


class GptOssDecoderLayer(LlamaDecoderLayer):
    @staticmethod
    def make_attention(config: ModelConfig, index: int) -> Attention:
        return make_attention(config, index, sinks=True)


class GptOssForCausalLM(DecoderForCausalLM):
    layer_type = GptOssDecoderLayer


# -- files ----------------------------------------------------------------------------------------


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    for name, known in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        if fields.number(name, known) != known:
            raise UnsupportedModelError(f"{fields.path}: {name} is only supported as {known}")
    windows = _WINDOWS.from_hf(fields, config)
    return {
        "layer_windows": windows,
        "experts": moe.from_hf(fields, config, inner="intermediate_size", **_EXPERTS),
    }


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    return {
        **moe.to_hf(config, "num_local_experts"),
        **hf_window_entries(config),
        "swiglu_limit": SWIGLU_LIMIT,
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    """Its rope is not rounded to whole dimensions, which files do not say."""
    return {
        "rope": replace(config.rope, truncate=False),
        "mlp_bias": False,
        "layer_windows": _WINDOWS.from_gguf(fields, config),
        "experts": moe.from_gguf(fields, config, normalize=True, **_EXPERTS),
    }


def _to_gguf(config: ModelConfig) -> Mapping[str, Any]:
    return {**moe.to_gguf(config), **_WINDOWS.to_gguf(config)}


_UP, _DOWN = "mlp.experts.N.gate_up_proj", "mlp.experts.N.down_proj"
_TURNED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_HF_LAYER = {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate_up_proj": f"{_UP}.weight",
    "mlp.experts.gate_up_proj_bias": f"{_UP}.bias",
    "mlp.experts.down_proj": f"{_DOWN}.weight",
    "mlp.experts.down_proj_bias": f"{_DOWN}.bias",
}
_GGUF_LAYER = {
    **GGUF_LAYER,
    **moe.GGUF_LAYER,
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
del _GGUF_LAYER["ffn_norm"]

GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    model=GptOssForCausalLM,
    gguf="gpt-oss",
    gguf_needs_head=True,
    hf_names=HFNames(layer=_HF_LAYER, transposed=_TURNED, interleaved=(_UP,)),
    gguf_names=TensorNames(GGUF_TOP, _GGUF_LAYER),
    fused={_UP: ("mlp.experts.N.gate_proj", "mlp.experts.N.up_proj")},
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    hf_ignored={
        "experts_per_token": same_as("num_experts_per_tok"),
        "initial_context_length": always,
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=_from_gguf,
    to_gguf=_to_gguf,
)
