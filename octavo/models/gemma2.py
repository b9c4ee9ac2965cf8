"""Gemma 2: Gemma 3's layers, without norms of heads, and with soft caps.

Every other layer sees a sliding window, the first one among them; all turn positions alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.base.fields import Fields
from octavo.models.config import ModelConfig
from octavo.models.gemma3 import GEMMA3, scalar_of
from octavo.models.sliding_windows import WindowPattern, hf_window_entries

_WINDOWS = WindowPattern(2)
_LAYERS_OF_27B = 46  # whose scores are not scaled by the size of a head


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    return {
        "norm_plus_one": True,
        "layer_windows": _WINDOWS.from_hf(fields, config),
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "embedding_scale": math.sqrt(config.hidden_size),
    }


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    return {
        **hf_window_entries(config),
        "query_pre_attn_scalar": scalar_of(config.attention_scale),
        # A soft cap that is absent has its default, and so has to be said not to be there.
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    return {
        "activation": "gelu_tanh",
        "layer_windows": _WINDOWS.from_gguf(fields, config),
        "attention_scale": _gguf_scale(config),
        "embedding_scale": math.sqrt(config.hidden_size),
    }


def _gguf_scale(config: ModelConfig) -> float:
    """No key has it: llama.cpp goes by the number of layers."""
    if config.num_layers == _LAYERS_OF_27B:
        return (config.hidden_size // config.num_heads) ** -0.5
    return config.head_dim**-0.5


GEMMA2 = replace(
    GEMMA3,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    gguf="gemma2",
    hf_defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=_from_gguf,
    to_gguf=_WINDOWS.to_fixed_gguf,
)
