"""Gemma 3, the text model.

Against Llama: five layers of six see a sliding window and turn positions by another rope; each half
of a layer has a norm before and one after it; query and key heads have norms; norm weights are
stored less one (but not in GGUF files); embeddings are scaled up by the root of their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.models import llama
from octavo.models.config import ModelConfig
from octavo.models.config_to_hf import shortest
from octavo.models.decoder import DecoderForCausalLM, make_attention
from octavo.models.family import Family, TensorNames
from octavo.models.ignored_keys import beside, same_as
from octavo.models.sliding_windows import WindowPattern, hf_window_entries


class Gemma3DecoderLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        plus = float(config.norm_plus_one)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)
        self.self_attn = make_attention(
            config,
            index,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            qk_norm_plus=plus,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.self_attn(self.input_layernorm(x, ctx), cos_sin, ctx)
        x = ctx.ops.add(x, self.post_attention_layernorm(attended, ctx))
        fed = self.mlp(self.pre_feedforward_layernorm(x, ctx), ctx)
        return ctx.ops.add(x, self.post_feedforward_layernorm(fed, ctx))


class Gemma3ForCausalLM(DecoderForCausalLM):
    layer_type = Gemma3DecoderLayer


# -- files ----------------------------------------------------------------------------------------

GGUF_LAYER = {
    **llama.GGUF_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_NAMES = TensorNames(llama.GGUF_TOP, GGUF_LAYER)

_WINDOWS = WindowPattern(6)
_LOCAL_THETA = 10_000.0
_LAYERS_OF_27B = 62  # whose scores are not scaled by the size of a head


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    # The spelling of transformers 4.51 to 4.52, _sliding_window_pattern, is of later ones too.
    later = fields.integer("_sliding_window_pattern", _WINDOWS.period)
    period = fields.integer("sliding_window_pattern", later)
    windows = _WINDOWS.from_hf(fields, config, period)
    is_bidirectional = fields.boolean("use_bidirectional_attention", False)
    if is_bidirectional:  # files have the length of what is seen, to both sides (EmbeddingGemma)
        windows = tuple(None if size is None else size // 2 + 1 for size in windows)
    return {
        "bidirectional": is_bidirectional,
        "norm_plus_one": True,
        "qk_norm": True,
        "layer_windows": windows,
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "embedding_scale": math.sqrt(config.hidden_size),
    }


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    windows = config.layer_windows
    pattern = {"sliding_window_pattern": windows.index(None) + 1} if None in windows else {}
    local_rope = config.local_rope or config.rope
    return {
        **hf_window_entries(config),
        **pattern,
        "query_pre_attn_scalar": scalar_of(config.attention_scale),
        "rope_local_base_freq": shortest(local_rope.theta),
    }


def scalar_of(scale: float) -> int | float:
    """The number by whose square root attention scores are divided; whole in all published
    models."""
    scalar = scale**-2
    return round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-6) else scalar


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    theta = fields.number("rope.freq_base_swa", _LOCAL_THETA, above=1.0)
    local = replace(config.rope.unscaled(), theta=theta)
    return {
        "activation": "gelu_tanh",
        "layer_windows": _WINDOWS.from_gguf(fields, config),
        "local_rope": None if local == config.rope else local,
        "attention_scale": fields.number("attention.scale", _scale_of_files(config)),
        "embedding_scale": math.sqrt(config.hidden_size),
    }


def _to_gguf(config: ModelConfig) -> Mapping[str, Any]:
    entries = _WINDOWS.to_gguf(config)
    local_rope = config.local_rope or config.rope
    if local_rope.theta != _LOCAL_THETA:
        entries["rope.freq_base_swa"] = local_rope.theta
    if not math.isclose(config.attention_scale, _scale_of_files(config), rel_tol=1e-6):
        entries["attention.scale"] = config.attention_scale  # which llama.cpp does not ask for
    return entries


def _scale_of_files(config: ModelConfig) -> float:
    """The default scale of attention scores, for files without the field."""
    is_27b = config.num_layers == _LAYERS_OF_27B
    scaled_by = config.hidden_size // config.num_heads if is_27b else config.head_dim
    return scaled_by**-0.5


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    model=Gemma3ForCausalLM,
    gguf="gemma3",
    gguf_names=GGUF_NAMES,
    hf_fields={"hidden_act": "hidden_activation"},
    hf_defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": _WINDOWS.period,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    # Its configs say some things twice, and which layers have windows in three ways.
    hf_ignored={
        "sliding_window_size": same_as("sliding_window"),
        "sliding_window_pattern": beside("layer_types"),
        "_sliding_window_pattern": beside("layer_types"),
    },
    norm_plus_one=True,
    exceeds_float16=True,
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=_from_gguf,
    to_gguf=_to_gguf,
)
