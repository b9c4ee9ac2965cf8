"""What layers are made of, as families of Hugging Face configs have it.

Each function makes one part of one layer: mixers, an MLP; or all windows of a model.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.cost.hf_config import TextConfig
from octavo.cost.mixers import Attention, GatedDeltaNet, LatentAttention, Mamba2, Mixer
from octavo.cost.mlps import DenseMlp, ExpertMlp, Mlp
from octavo.fields import Fields

Windows = tuple[int | None, ...]


# -- attention ------------------------------------------------------------------------------------


def attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    family, heads, head_dim = config.family, config.heads, config.head_dim
    kv_heads = _kv_heads(config)
    qk_norm = family.qk_norm(config) if callable(family.qk_norm) else family.qk_norm
    bias = config.flag(family.bias_field, family.qkv_bias) if family.bias_field else family.qkv_bias
    output_bias = bias if family.output_bias is None else family.output_bias
    return (
        Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=config.windows[layer],
            qkv_bias=bias,
            output_bias=config.flag("attention_out_bias", output_bias),
            qk_norm_size={
                "none": 0,
                "head": 2 * head_dim,
                "full": (heads + kv_heads) * head_dim,
            }[qk_norm],
            has_output_gate=family.has_output_gate,
            num_sinks=heads if family.has_sinks else 0,
        ),
    )


def _kv_heads(config: TextConfig) -> int:
    if config.family.multi_query and config.flag("multi_query", True):
        return 1
    return int(config.integer("num_key_value_heads", config.heads))


def latent_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    return (
        LatentAttention(
            heads=config.heads,
            kv_rank=config.integer("kv_lora_rank"),
            nope_dim=config.integer("qk_nope_head_dim"),
            rope_dim=config.integer("qk_rope_head_dim"),
            value_dim=config.integer("v_head_dim"),
            q_rank=config.integer("q_lora_rank", None),
        ),
    )


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


def _mamba2(config: TextConfig, has_norm: bool = True) -> Mamba2:
    """As Bamba, Granite and Falcon-H1 have it; the inner size is a multiple of the hidden one where
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
        norm_size=inner if has_norm else 0,
    )


def mamba_beside_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    mamba = _mamba2(config, has_norm=config.flag("mamba_rms_norm", False))
    return (*attention(config, layer), mamba)


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
    kind = _nemotron_layers(config)[layer]
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


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_layers(config: TextConfig) -> list[str]:
    """What each layer is, of either spelling."""
    name = "hybrid_override_pattern"
    if name not in config:
        return config.kinds("layers_block_type", _NEMOTRON_LETTERS.values())
    letters = config.text(name)
    if len(letters) != config.num_layers or not set(letters) <= set(_NEMOTRON_LETTERS):
        raise config.error(name, f"is not a letter of M*-E for each of {config.num_layers} layers")
    return [_NEMOTRON_LETTERS[letter] for letter in letters]


# -- windows --------------------------------------------------------------------------------------


def no_windows(config: TextConfig) -> Windows:
    return (None,) * config.num_layers


def same_window(config: TextConfig) -> Windows:
    return (config.integer("sliding_window", None),) * config.num_layers


def windows_by_type(pattern: int, default: int | None = None) -> Callable[[TextConfig], Windows]:
    """``layer_types`` where a config has it; else each ``pattern``-th layer sees everything."""

    def windows(config: TextConfig) -> Windows:
        window = config.integer("sliding_window", default)
        if "layer_types" in config:
            types = config.kinds("layer_types", ("sliding_attention", "full_attention"))
            return tuple(window if each == "sliding_attention" else None for each in types)
        every = config.integer("sliding_window_pattern", None) or config.integer(
            "_sliding_window_pattern", pattern
        )
        return tuple(window if (i + 1) % every else None for i in range(config.num_layers))

    return windows


def windows_if_used(config: TextConfig) -> Windows:
    """Qwen's: only with ``use_sliding_window``, and from ``max_window_layers`` on."""
    if not config.flag("use_sliding_window", False):
        return no_windows(config)
    first = config.integer("max_window_layers", 28, minimum=0)
    window = config.integer("sliding_window", None)
    return tuple(window if i >= first else None for i in range(config.num_layers))


def chunks_but_every_fourth(config: TextConfig) -> Windows:
    """Llama 4: layers with positions attend within chunks, those without to everything."""
    chunk = config.integer("attention_chunk_size", 8192)
    no_rope = config.raw("no_rope_layers") or []
    if no_rope:
        has_rope = config.entries("no_rope_layers", config.num_layers)
    else:
        every = config.integer("no_rope_layer_interval", 4)
        has_rope = [(i + 1) % every for i in range(config.num_layers)]
    return tuple(chunk if rope else None for rope in has_rope)


# -- MLPs -----------------------------------------------------------------------------------------


def dense(config: TextConfig, layer: int) -> Mlp:
    inner = config.integer("intermediate_size", 4 * config.hidden)
    return _dense_of(config, inner)


def _dense_of(config: TextConfig, inner: int) -> DenseMlp:
    family = config.family
    has_bias = config.flag(family.mlp_bias_field, family.mlp_bias)
    return DenseMlp(inner=inner, is_gated=family.is_gated, has_bias=has_bias)


def _experts_of(config: TextConfig, inner: int, shared: DenseMlp | None = None) -> ExpertMlp:
    family = config.family
    return ExpertMlp(
        num_experts=config.integer("num_experts"),
        per_token=config.integer("num_experts_per_tok", family.experts_per_token),
        inner=inner,
        is_gated=family.is_gated,
        has_bias=family.mlp_bias,
        router_bias=family.router_bias,
        shared=shared,
        has_shared_gate=family.has_shared_gate and shared is not None,
    )


def experts_everywhere(config: TextConfig, layer: int) -> Mlp:
    """Experts in all layers; their size is that of the model's MLP where they have no own."""
    inner = config.integer("moe_intermediate_size", None) or config.integer("intermediate_size")
    size = config.integer("shared_intermediate_size", 0, minimum=0)
    return _experts_of(config, inner, _dense_of(config, size) if size else None)


def experts_or_dense(config: TextConfig, layer: int) -> Mlp:
    """Granite's: experts if there are any, beside an MLP that is always there."""
    if config.integer("num_experts", 0, minimum=0):
        return experts_everywhere(config, layer)
    return _dense_of(config, config.integer("shared_intermediate_size"))


def qwen_experts(config: TextConfig, layer: int) -> Mlp:
    without = config.entries("mlp_only_layers") if "mlp_only_layers" in config else []
    if layer in without or (layer + 1) % config.integer("decoder_sparse_step", 1):
        return dense(config, layer)
    size = config.integer("shared_expert_intermediate_size", 0, minimum=0)
    shared = _dense_of(config, size) if size else None
    return _experts_of(config, config.integer("moe_intermediate_size"), shared)


def deepseek_experts(config: TextConfig, layer: int) -> Mlp:
    """The first layers are dense; shared experts are one MLP of their sizes together."""
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    if layer < first or layer % config.integer("moe_layer_freq", 1):
        return dense(config, layer)
    inner = config.integer("moe_intermediate_size")
    count = config.integer("n_shared_experts", 0, minimum=0)
    return _experts_of(config, inner, _dense_of(config, inner * count) if count else None)


def llama4_experts(config: TextConfig, layer: int) -> Mlp:
    step = config.integer("interleave_moe_layer_step", 1)
    if (layer + 1) % step:
        return _dense_of(config, config.integer("intermediate_size_mlp"))
    inner = config.integer("intermediate_size")
    return _experts_of(config, inner, _dense_of(config, inner))


def nemotron_mlp(config: TextConfig, layer: int) -> Mlp | None:
    kind = _nemotron_layers(config)[layer]
    if kind == "moe":
        size = config.integer("moe_shared_expert_intermediate_size")
        return _experts_of(config, config.integer("moe_intermediate_size"), _dense_of(config, size))
    return dense(config, layer) if kind == "mlp" else None
