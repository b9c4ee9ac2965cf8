"""Layers that keep a state in place of keys and values, as families of Hugging Face configs have
them. Each function makes the mixers of one layer; hybrids have attention in some.
"""

from __future__ import annotations

from octavo.base.fields import Fields
from octavo.cost.hf_config import TextConfig
from octavo.cost.hf_layers import attention, latent_attention, nemotron_layers
from octavo.cost.mixers import Mixer
from octavo.cost.recurrences import (
    GatedDeltaNet,
    KimiDelta,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from octavo.cost.weight_shape import WeightShape

# -- linear attention -----------------------------------------------------------------------------


def delta_net_or_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    if _layer_type(config, layer) == "full_attention":
        return attention(config, layer)
    return (
        GatedDeltaNet(
            heads=config.integer("linear_num_value_heads"),
            key_heads=config.integer("linear_num_key_heads"),
            key_dim=config.integer("linear_key_head_dim"),
            value_dim=config.integer("linear_value_head_dim"),
            kernel=config.integer("linear_conv_kernel_dim"),
        ),
    )


def _layer_type(config: TextConfig, layer: int) -> str:
    if "layer_types" in config:
        return config.kinds("layer_types", ("linear_attention", "full_attention"))[layer]
    interval = config.integer("full_attention_interval", 4)
    return "linear_attention" if (layer + 1) % interval else "full_attention"


def kimi_delta_or_latent(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    """``linear_attn_config`` counts its layers from one."""
    nested = config.section("linear_attn_config", {})
    if "layer_types" in config:
        is_full = _layer_type(config, layer) == "full_attention"
    else:
        is_full = layer + 1 in nested.each("full_attn_layers", Fields.integer)
    if is_full:
        return latent_attention(config, layer)
    return (
        KimiDelta(
            heads=config.integer("linear_num_heads", None) or nested.integer("num_heads"),
            head_dim=config.integer("linear_head_dim", None) or nested.integer("head_dim"),
            kernel=config.integer("linear_conv_kernel_dim", None)
            or nested.integer("short_conv_kernel_size", 4),
            has_full_gate=nested.boolean("use_full_rank_gate", False),
        ),
    )


def kimi_beside(config: TextConfig, layer: int) -> tuple[WeightShape, ...]:
    """Attention residuals (Kimi K3): a layer attends to the outputs of blocks of layers before it,
    by a learned query for its mixer and one for its MLP."""
    if not config.integer("attn_res_block_size", 0, minimum=0):
        return ()
    return (WeightShape("attn_res", "norm", 2 * config.hidden),)


def lightning_or_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    """MiniMax's ``attn_type_list`` has a 1 where a layer has attention."""
    if "attn_type_list" in config:
        is_full = bool(config.each("attn_type_list", _index, config.num_layers)[layer])
    elif "layer_types" in config:
        is_full = _layer_type(config, layer) == "full_attention"
    else:
        is_full = not layer % 2
    if is_full:
        return attention(config, layer)
    return (LightningAttention(heads=config.heads, head_dim=config.head_dim),)


def convolution_or_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    if "layer_types" in config:
        is_full = config.kinds("layer_types", ("conv", "full_attention"))[layer] != "conv"
    else:
        is_full = layer in config.each("full_attn_idxs", _index)
    if is_full:
        return attention(config, layer)
    kernel = config.integer("conv_L_cache", 3)
    has_bias = config.flag("conv_bias", False)
    return (ShortConvolution(size=config.hidden, kernel=kernel, has_bias=has_bias),)


# -- state spaces ---------------------------------------------------------------------------------


def mamba1(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    """Layers as Mamba and Falcon-Mamba have them, all alike."""
    inner = config.integer("intermediate_size", int(config.number("expand", 2.0) * config.hidden))
    return (
        Mamba1(
            inner=inner,
            state_dim=config.integer("state_size", 16),
            step_rank=_step_rank(config, "time_step_rank"),
            kernel=config.integer("conv_kernel", 4),
            has_conv_bias=config.flag("use_conv_bias", True),
            has_proj_bias=config.flag("use_bias", False),
        ),
    )


def mamba1_or_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    """Jamba's."""
    period = config.integer("attn_layer_period", 8)
    if layer % period == config.integer("attn_layer_offset", 4, minimum=0):
        return attention(config, layer)
    return (
        Mamba1(
            inner=config.integer("mamba_expand", 2) * config.hidden,
            state_dim=config.integer("mamba_d_state", 16),
            step_rank=_step_rank(config, "mamba_dt_rank"),
            kernel=config.integer("mamba_d_conv", 4),
            has_conv_bias=config.flag("mamba_conv_bias", True),
            has_proj_bias=config.flag("mamba_proj_bias", False),
            has_norms=True,
        ),
    )


def _step_rank(config: TextConfig, name: str) -> int:
    """``auto`` is a sixteenth of the hidden size."""
    if config.raw(name, "auto") == "auto":
        return -(-config.hidden // 16)
    return int(config.integer(name))


def mamba2(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    """All layers alike, as in Mamba 2 and Codestral Mamba."""
    heads, head_dim = config.integer("num_heads", 128), config.integer("head_dim", 64)
    has_bias = config.flag("use_bias", False)
    return (
        Mamba2(
            heads=heads,
            head_dim=head_dim,
            state_dim=config.integer("state_size", 128),
            groups=config.integer("n_groups", 8),
            kernel=config.integer("conv_kernel", 4),
            has_conv_bias=config.flag("use_conv_bias", True),
            has_proj_bias=has_bias,
            norm_size=heads * head_dim,
        ),
    )


def _mamba2(config: TextConfig) -> Mamba2:
    """Bamba's; the inner size is a multiple of the hidden one where
    it is not given."""
    heads = config.integer("mamba_n_heads")
    expanded = int(config.number("mamba_expand", 2.0) * config.hidden)
    inner = config.integer("mamba_d_ssm", expanded)
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        state_dim=config.integer("mamba_d_state"),
        groups=config.integer("mamba_n_groups"),
        kernel=config.integer("mamba_d_conv"),
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_proj_bias=config.flag("mamba_proj_bias", False),
        norm_size=inner,
    )


def mamba_or_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    if "layer_types" in config:
        kinds = config.kinds("layer_types", ("mamba", "attention", "full_attention"))
        is_attention = kinds[layer] != "mamba"
    else:
        is_attention = layer in config.each("attn_layer_indices", _index)
    return attention(config, layer) if is_attention else (_mamba2(config),)


def _index(fields: Fields, name: str) -> int:
    return int(fields.integer(name, minimum=0))


def nemotron_mixer(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    """Layers are of one thing each."""
    kind = nemotron_layers(config)[layer]
    if kind == "attention":
        return attention(config, layer)
    if kind != "mamba":
        return ()
    heads, head_dim = config.integer("mamba_num_heads"), config.integer("mamba_head_dim")
    mamba = Mamba2(
        heads=heads,
        head_dim=head_dim,
        state_dim=config.integer("ssm_state_size"),
        groups=config.integer("n_groups"),
        kernel=config.integer("conv_kernel"),
        has_conv_bias=config.flag("use_conv_bias", True),
        has_proj_bias=config.flag("mamba_proj_bias", False),
        norm_size=heads * head_dim,
    )
    return (mamba,)
