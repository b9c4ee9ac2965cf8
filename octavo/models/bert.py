"""BERT, and RoBERTa with XLM-RoBERTa, which differ from it in their files alone.

A layer has its norms behind attention and MLP, over the sum with what went in. Positions, and which
of two texts a token is of, are learned vectors (Devlin et al. 2018, arXiv 1810.04805).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.fields import Fields, GGUFFields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import PlainMLP
from octavo.layers.module import Module
from octavo.layers.norm import LayerNorm
from octavo.models.config import Activation, ModelConfig
from octavo.models.decoder import make_attention
from octavo.models.encoder import Encoder
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.ignored_keys import Meaningless, always, only


class BertLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        self.self_attn = make_attention(config, index)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = PlainMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias
        )
        self.post_feedforward_layernorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.self_attn(x, cos_sin, ctx)
        x = self.post_attention_layernorm(ctx.ops.add(x, attended), ctx)
        fed: Activations = self.post_feedforward_layernorm(ctx.ops.add(x, self.mlp(x, ctx)), ctx)
        return fed


class BertModel(Encoder):
    layer_type = BertLayer


# -- files ----------------------------------------------------------------------------------------

_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_feedforward_layernorm",
}
_ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "relu", "silu")


def _names(prefix: str) -> HFNames:
    """The names of a folder, in which a model with a head has ``prefix`` before its body.

    Heads are read where they are used (``pooling_files.py``).
    """
    return HFNames(
        {
            f"{prefix}embeddings.word_embeddings": "model.embed_tokens",
            f"{prefix}embeddings.position_embeddings": "model.embed_positions",
            f"{prefix}embeddings.token_type_embeddings": "model.embed_types",
            f"{prefix}embeddings.LayerNorm": "model.embed_norm",
        },
        _LAYER,
        f"{prefix}encoder.layer",
        prefix=prefix,
        ignored=(
            rf"({prefix})?(embeddings\.(position_ids|token_type_ids)|pooler\..*)"
            r"|(cls|lm_head|classifier)\..*"
        ),
    )


def _from_hf(fields: Fields, config: ModelConfig, first_position: int = 0) -> dict[str, Any]:
    """Return what all of them have; positions begin at a row of their table."""
    rows = config.max_position
    if rows <= first_position:
        raise fields.error("max_position_embeddings", f"{rows} rows, of which none is a position")
    return {
        **_of_all(config),
        "learned_positions": rows,
        "max_position": rows - first_position,
        "token_types": fields.integer("type_vocab_size", minimum=0, maximum=1 << 16),
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    # Files of RoBERTa have the rows of its table from the first position on.
    assert isinstance(fields, GGUFFields)
    return {
        **_of_all(config),
        "activation": "gelu",
        "learned_positions": config.max_position,
        "token_types": fields.num_rows("token_types.weight"),
    }


def _of_all(config: ModelConfig) -> dict[str, Any]:
    return {
        "bidirectional": True,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "num_kv_heads": config.num_heads,
        "unrotated_layers": tuple(range(config.num_layers)),
    }


def _roberta_from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    # The first row behind that of padding, as fairseq numbers positions.
    return _from_hf(fields, config, fields.integer("pad_token_id", minimum=0) + 1)


_FIELDS = {"rms_norm_eps": "layer_norm_eps"}
_DEFAULTS = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "rope_theta": 10_000.0,  # which turns nothing
    "tie_word_embeddings": True,
}
_IGNORED: Mapping[str, Meaningless] = {
    "position_embedding_type": only("absolute"),
    "is_decoder": only(False),
    "add_cross_attention": only(False),
    "num_key_value_heads": always,
    # Of heads, which are read by themselves.
    "classifier_dropout": always,
    "gradient_checkpointing": always,
    "directionality": always,
    "output_past": always,
    **dict.fromkeys(
        (
            *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
            *("pooler_size_per_head", "pooler_type", "summary_type", "summary_use_proj"),
        ),
        always,
    ),
}
_GGUF_NAMES = TensorNames(
    {
        "token_embd": "model.embed_tokens",
        "position_embd": "model.embed_positions",
        "token_types": "model.embed_types",
        "token_embd_norm": "model.embed_norm",
    },
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_output_norm": "post_attention_layernorm",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "layer_output_norm": "post_feedforward_layernorm",
    },
)

BERT = Family(
    architecture="BertModel",
    model_type="bert",
    model=BertModel,
    gguf="bert",
    hf_names=_names("bert."),
    gguf_names=_GGUF_NAMES,
    gguf_fields={"attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon"},
    gguf_ignored={"attention.causal": only(False)},
    hf_fields=_FIELDS,
    hf_defaults=_DEFAULTS,
    hf_ignored=_IGNORED,
    activations=_ACTIVATIONS,
    from_hf=_from_hf,
    to_hf=lambda config: {
        "type_vocab_size": config.token_types,
        "max_position_embeddings": config.learned_positions,
    },
    from_gguf=_from_gguf,
    to_gguf=lambda config: {"attention.causal": False},
)

ROBERTA = Family(
    architecture="XLMRobertaModel",
    model_type="xlm-roberta",
    model=BertModel,
    hf_names=_names("roberta."),
    hf_fields=_FIELDS,
    hf_defaults={**_DEFAULTS, "vocab_size": 50_265, "pad_token_id": 1},
    hf_ignored=_IGNORED,
    activations=_ACTIVATIONS,
    from_hf=_roberta_from_hf,
    to_hf=lambda config: {
        "type_vocab_size": config.token_types,
        "max_position_embeddings": config.learned_positions,
        "pad_token_id": (config.learned_positions or 0) - config.max_position - 1,
    },
)
