"""GLM-4.5: Llama's layers with a part of each head that is not rotated, and with experts.

The first layers have one MLP. In the others experts are chosen by sigmoids and a correction, as
DeepSeek-V3 does, beside an MLP that all tokens use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.base.fields import Fields
from octavo.models import experts as moe
from octavo.models.config import ModelConfig
from octavo.models.family import Family, TensorNames
from octavo.models.llama import GGUF_LAYER, GGUF_TOP, HF_DEFAULTS, LlamaForCausalLM


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    first = fields.integer("first_k_dense_replace", minimum=0)
    layers = [index >= first for index in range(config.num_layers)]
    return {
        "attention_output_bias": False,
        "qk_norm": fields.boolean("use_qk_norm", False),
        "experts": moe.from_hf_grouped(fields, config, layers, by_sigmoid=True),
    }


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    return {
        **moe.to_hf_grouped(config),
        "attention_bias": config.attention_bias,
        "use_qk_norm": config.qk_norm,
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    """The number of layers without those for drafting (MTP), which are the last ones."""
    num_layers = config.num_layers - fields.integer("nextn_predict_layers", 0, minimum=0)
    experts = moe.from_gguf_grouped(fields, config, correction=True)
    return {
        "num_layers": num_layers,
        "layer_windows": config.layer_windows[:num_layers],
        "experts": replace(experts, layers=experts.layers[:num_layers]),
    }


_GGUF_LAYER = {
    **GGUF_LAYER,
    **moe.GGUF_LAYER,
    "post_attention_norm": "post_attention_layernorm",
}
del _GGUF_LAYER["ffn_norm"]

GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    model=LlamaForCausalLM,
    gguf="glm4moe",
    gguf_names=TensorNames(GGUF_TOP, _GGUF_LAYER),
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=_from_gguf,
    to_gguf=moe.to_gguf_grouped,
)
