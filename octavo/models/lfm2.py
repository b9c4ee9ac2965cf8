"""LFM2: short convolutions between gates, and some layers that attend (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.fields import Fields
from octavo.kernels.recurrence_specs import ConvSpec
from octavo.layers.recurrence_config import RecurrenceConfig
from octavo.layers.recurrent import ShortConv
from octavo.models import hybrid
from octavo.models.config import ModelConfig
from octavo.models.config_gguf import gguf_recurrent_layers
from octavo.models.decoder import DecoderForCausalLM
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.ignored_keys import always, beside, only, same_as
from octavo.models.llama import GGUF_LAYER, GGUF_TOP


class Lfm2DecoderLayer(hybrid.HybridDecoderLayer):
    mixer_type = ShortConv


class Lfm2ForCausalLM(DecoderForCausalLM):
    layer_type = Lfm2DecoderLayer


# -- files ----------------------------------------------------------------------------------------

HF_NAMES = HFNames(
    {"model.embedding_norm": "model.norm"},
    {
        "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "self_attn.out_proj": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        **hybrid.mixer_names("conv", ("in_proj", "conv", "out_proj")),
    },
)


GGUF_NAMES = TensorNames(
    {**GGUF_TOP, "token_embd_norm": "model.norm"},  # the name of another norm, by mistake
    {
        **GGUF_LAYER,
        "shortconv.in_proj": "mixer.in_proj",
        "shortconv.conv": "mixer.conv",
        "shortconv.out_proj": "mixer.out_proj",
    },
    values={"mixer.conv.weight": hybrid.GGUF_CONV},
)


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    if "layer_types" in fields:
        layers = hybrid.hf_layers_of(fields, config.num_layers, ("conv",))
    else:
        attending = fields.each("full_attn_idxs", lambda f, name: f.integer(name, minimum=0))
        layers = tuple(index for index in range(config.num_layers) if index not in attending)
    bias = fields.boolean("conv_bias", False)
    conv = ConvSpec(
        channels=config.hidden_size, kernel=fields.integer("conv_L_cache", minimum=2), gated=True
    )
    return {
        "intermediate_size": _inner_size(fields, config.intermediate_size),
        "tie_embeddings": fields.boolean("tie_embedding", config.tie_embeddings),
        "qk_norm": True,
        "recurrence": RecurrenceConfig(layers=layers, conv=conv, conv_bias=bias, proj_bias=bias),
    }


def _inner_size(fields: Fields, size: int) -> int:
    """Width of the MLP: most configs have that of an MLP without a gate, and the gated one is
    smaller."""
    size = fields.integer("block_ff_dim", size)
    if not fields.boolean("block_auto_adjust_ff_dim"):
        return size
    size = int(fields.number("block_ffn_dim_multiplier") * int(2 * size / 3))
    multiple: int = fields.integer("block_multiple_of")
    return -(-size // multiple) * multiple


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    recurrence = config.recurrence
    assert recurrence is not None
    return {
        "layer_types": hybrid.hf_layer_types(config, "conv"),
        "conv_L_cache": recurrence.conv.kernel,
        "conv_bias": recurrence.conv_bias,
        "block_auto_adjust_ff_dim": False,
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    kernel = fields.integer("shortconv.l_cache", minimum=2)
    conv = ConvSpec(channels=config.hidden_size, kernel=kernel, gated=True)
    layers = gguf_recurrent_layers(fields)
    return {"qk_norm": True, "recurrence": RecurrenceConfig(layers=layers, conv=conv)}


def _to_gguf(config: ModelConfig) -> Mapping[str, Any]:
    assert config.recurrence is not None
    return {**hybrid.gguf_heads(config), "shortconv.l_cache": config.recurrence.conv.kernel}


LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    model=Lfm2ForCausalLM,
    gguf="lfm2",
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    hf_fields={"rms_norm_eps": "norm_eps"},
    hf_defaults={
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "hidden_act": "silu",
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_ignored={
        "full_attn_idxs": beside("layer_types"),
        "block_norm_eps": same_as("norm_eps"),
        "num_heads": same_as("num_attention_heads"),
        "theta": same_as("rope_theta"),
        **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), same_as("hidden_size")),
        **dict.fromkeys(("block_use_swiglu", "use_pos_enc"), only(True)),
        **dict.fromkeys(
            (
                *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
                "conv_use_xavier_init",
            ),
            always,
        ),
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=_from_gguf,
    to_gguf=_to_gguf,
)
