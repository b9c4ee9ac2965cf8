"""GLM-4 (0414): Gemma 3's norms before and behind both halves of a layer, under other names; rope
turns neighbours, and only the first half of each head; gates and ups are one matrix in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.fields import Fields
from octavo.models.config import ModelConfig
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.gemma3 import GGUF_LAYER, Gemma3ForCausalLM
from octavo.models.llama import GGUF_TOP, HF_DEFAULTS
from octavo.models.phi3 import FUSED_GATE_UP


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    return {"attention_output_bias": False}  # it never has that one


GLM4 = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    model=Gemma3ForCausalLM,
    gguf="glm4",
    hf_names=HFNames(
        layer={
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
    ),
    gguf_names=TensorNames(
        GGUF_TOP,
        {
            **{name: module for name, module in GGUF_LAYER.items() if name != "ffn_gate"},
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    fused=FUSED_GATE_UP,
    hf_interleaved=True,
    gguf_interleaved=True,
    hf_defaults={
        **HF_DEFAULTS,
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    from_hf=_from_hf,
    to_hf=lambda config: {"attention_bias": config.attention_bias, "pad_token_id": None},
)
