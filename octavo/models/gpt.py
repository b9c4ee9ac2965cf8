"""Models with LayerNorm, biases everywhere and an MLP without a gate: GPT-2, OPT, StarCoder 2.

Positions are learned vectors in GPT-2 and OPT, and turned by rope in StarCoder 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import PlainMLP
from octavo.layers.module import Module
from octavo.layers.norm import LayerNorm
from octavo.models.config import Activation, ModelConfig
from octavo.models.decoder import DecoderForCausalLM, make_attention
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.ignored_keys import always, only, same_as
from octavo.models.llama import GGUF_LAYER, GGUF_TOP, HF_DEFAULTS
from octavo.models.phi3 import FUSED_QKV
from octavo.models.sliding_windows import window_everywhere, window_size


class GPTDecoderLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        self.input_layernorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.self_attn = make_attention(config, index)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = PlainMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias
        )

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.self_attn(self.input_layernorm(x, ctx), cos_sin, ctx)
        x = ctx.ops.add(x, attended)
        fed = self.mlp(self.post_attention_layernorm(x, ctx), ctx)
        return ctx.ops.add(x, fed)


class GPTForCausalLM(DecoderForCausalLM):
    layer_type = GPTDecoderLayer

    @staticmethod
    def make_norm(config: ModelConfig) -> Module:
        return LayerNorm(config.hidden_size, config.norm_eps)


# -- files ----------------------------------------------------------------------------------------

_ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "relu", "silu")
_EPSILON = {"attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon"}
_DEFAULTS = {"rope_theta": HF_DEFAULTS["rope_theta"], "tie_word_embeddings": True}
_BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}


def _learned(config: ModelConfig, offset: int = 0) -> dict[str, Any]:
    """Positions that a table has, in the rows from ``offset`` on."""
    return {
        **_BIASES,
        "num_kv_heads": config.num_heads,
        "learned_positions": config.max_position + offset,
        "unrotated_layers": tuple(range(config.num_layers)),
    }


def _gpt2_from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    for name, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if fields.boolean(name, value) != value:
            raise UnsupportedModelError(f"{fields.path}: {name} is not supported")
    return _learned(config)


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    model=GPTForCausalLM,
    gguf="gpt2",
    hf_names=HFNames(
        {
            "transformer.wte": "model.embed_tokens",
            "transformer.wpe": "model.embed_positions",
            "transformer.ln_f": "model.norm",
        },
        {
            "ln_1": "input_layernorm",
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
            "ln_2": "post_attention_layernorm",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
        },
        "transformer.h",
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        ignored=r".*\.attn\.(masked_)?bias",  # the causal mask
        prefix="transformer.",
    ),
    gguf_names=TensorNames(
        {**GGUF_TOP, "position_embd": "model.embed_positions"},
        {**GGUF_LAYER, "attn_qkv": "self_attn.qkv_proj"},
    ),
    fused=FUSED_QKV,
    hf_fields={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    gguf_fields=_EPSILON,
    hf_defaults={
        **_DEFAULTS,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
    },
    hf_ignored={
        "n_ctx": same_as("n_positions"),
        "num_key_value_heads": same_as("n_head"),
        **dict.fromkeys(
            (
                *("summary_type", "summary_use_proj", "summary_activation", "model_parallel"),
                *("summary_proj_to_labels", "summary_first_dropout", "reorder_and_upcast_attn"),
            ),
            always,
        ),
    },
    activations=_ACTIVATIONS,
    from_hf=_gpt2_from_hf,
    from_gguf=lambda fields, config: {**_learned(config), "activation": "gelu_tanh"},
)


def _opt_from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    width = fields.integer("word_embed_proj_dim", config.hidden_size)
    if not fields.boolean("do_layer_norm_before", True) or width != config.hidden_size:
        raise UnsupportedModelError(
            f"{fields.path}: an OPT with norms behind its layers, or with embeddings of another "
            "size than its layers, as the one of 350M has them"
        )
    for name in ("enable_bias", "layer_norm_elementwise_affine"):
        if not fields.boolean(name, True):
            raise UnsupportedModelError(f"{fields.path}: an OPT without {name}")
    return _learned(config, offset=2)


OPT = Family(
    architecture="OPTForCausalLM",
    model_type="opt",
    model=GPTForCausalLM,
    hf_names=HFNames(
        {
            "model.decoder.embed_tokens": "model.embed_tokens",
            "model.decoder.embed_positions": "model.embed_positions",
            "model.decoder.final_layer_norm": "model.norm",
        },
        {
            "self_attn_layer_norm": "input_layernorm",
            "self_attn.out_proj": "self_attn.o_proj",
            "final_layer_norm": "post_attention_layernorm",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        },
        "model.decoder.layers",
    ),
    hf_fields={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    hf_defaults={
        **_DEFAULTS,
        "activation_function": "relu",
        "rms_norm_eps": 1e-5,  # which its configs do not have
        "max_position_embeddings": 2048,
    },
    hf_ignored={"_remove_final_layer_norm": only(False), "output_projection": only(True)},
    activations=_ACTIVATIONS,
    from_hf=_opt_from_hf,
)


def _starcoder2_from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    biases = dict.fromkeys(_BIASES, fields.boolean("use_bias", True))
    return {**biases, **window_everywhere(fields, config)}


STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    model=GPTForCausalLM,
    gguf="starcoder2",
    hf_names=HFNames(layer={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    gguf_names=TensorNames(GGUF_TOP, GGUF_LAYER),
    hf_fields={"rms_norm_eps": "norm_epsilon"},
    gguf_fields=_EPSILON,
    hf_defaults={
        **_DEFAULTS,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
    },
    hf_ignored={
        "activation_function": always,  # hidden_act is what it goes by
        "layer_norm_epsilon": same_as("norm_epsilon"),
        "mlp_type": only("default"),
        "norm_type": only("layer_norm"),
        # How softmax is computed, which is in float32 here whatever they say.
        "attention_softmax_in_fp32": always,
        "scale_attention_softmax_in_fp32": always,
        "scale_attn_weights": only(True),
    },
    activations=_ACTIVATIONS,
    from_hf=_starcoder2_from_hf,
    to_hf=lambda config: {
        "use_bias": config.attention_bias,
        "sliding_window": window_size(config),
    },
    from_gguf=lambda fields, config: {
        "mlp_bias": config.attention_bias,
        "activation": "gelu_tanh",
    },
)
