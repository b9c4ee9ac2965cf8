"""ModernBERT.

Against BERT: positions are turned by rope; of three layers, two see only the tokens nearby, by a
rope of their own; norms come before attention and MLP, which is gated; the first layer attends to
the normed embedding as it is (Warner et al. 2024, arXiv 2412.13663).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import LayerNorm
from octavo.models.config import ModelConfig
from octavo.models.decoder import make_attention
from octavo.models.encoder import Encoder
from octavo.models.family import Family, HFNames
from octavo.models.ignored_keys import always
from octavo.models.phi3 import FUSED_GATE_UP, FUSED_QKV
from octavo.models.sliding_windows import windows_of


class ModernBertLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        self.input_layernorm = None if index == 0 else _norm(config)
        self.self_attn = make_attention(config, index)
        self.post_attention_layernorm = _norm(config)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias
        )

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        normed = x if self.input_layernorm is None else self.input_layernorm(x, ctx)
        x = ctx.ops.add(x, self.self_attn(normed, cos_sin, ctx))
        return ctx.ops.add(x, self.mlp(self.post_attention_layernorm(x, ctx), ctx))


class ModernBertModel(Encoder):
    layer_type = ModernBertLayer

    @staticmethod
    def make_norm(config: ModelConfig) -> Module:
        return _norm(config)


def _norm(config: ModelConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)


# -- files ----------------------------------------------------------------------------------------


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    period = fields.integer("global_attn_every_n_layers", 3)
    # A token sees half of ``local_attention`` to each side, and itself.
    reach = fields.integer("local_attention") // 2 + 1
    by_period = None if "layer_types" in fields else (lambda layer: layer % period != 0)
    windows = windows_of(reach, fields, config.num_layers, by_period)
    bias = fields.boolean("attention_bias", False)
    rope, local = config.rope, config.local_rope
    if "rope_parameters" not in fields:
        rope = replace(rope, theta=fields.number("global_rope_theta", 160_000.0, above=1.0))
        local = replace(rope, theta=fields.number("local_rope_theta", 10_000.0, above=1.0))
    return {
        "bidirectional": True,
        "num_kv_heads": config.num_heads,
        "layer_windows": windows,
        "rope": rope,
        "local_rope": None if local == rope else local,
        "attention_bias": bias,
        "attention_output_bias": bias,
        "norm_bias": fields.boolean("norm_bias", False),
    }


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    reach = max((window for window in config.layer_windows if window is not None), default=65)
    local = config.local_rope or config.rope
    return {
        "norm_bias": config.norm_bias,
        "local_attention": 2 * (reach - 1),
        "layer_types": [
            "full_attention" if window is None else "sliding_attention"
            for window in config.layer_windows
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config.rope.theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local.theta},
        },
    }


MODERNBERT = Family(
    architecture="ModernBertModel",
    model_type="modernbert",
    model=ModernBertModel,
    hf_names=HFNames(
        {
            "model.embeddings.tok_embeddings": "model.embed_tokens",
            "model.embeddings.norm": "model.embed_norm",
            "model.final_norm": "model.norm",
        },
        {
            "attn_norm": "input_layernorm",
            "attn.Wqkv": "self_attn.qkv_proj",
            "attn.Wo": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "mlp.Wi": "mlp.gate_up_proj",
            "mlp.Wo": "mlp.down_proj",
        },
        ignored=r"(head|decoder|classifier)\..*",  # heads are read by themselves
    ),
    fused={**FUSED_QKV, **FUSED_GATE_UP},
    hf_fields={"rms_norm_eps": "norm_eps", "hidden_act": "hidden_activation"},
    hf_defaults={
        "vocab_size": 50_368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "rope_theta": 160_000.0,
        "tie_word_embeddings": True,
    },
    hf_ignored={
        "sliding_window": always,  # which local_attention says
        "position_embedding_type": always,  # there is no table of positions in any of them
        **dict.fromkeys(
            (
                *("decoder_bias", "classifier_bias", "classifier_activation", "classifier_pooling"),
                *("sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn"),
                *("reference_compile", "repad_logits_with_grad", "initializer_cutoff_factor"),
                *("gradient_checkpointing", "layer_norm_eps", "num_key_value_heads"),
            ),
            always,
        ),
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
)
