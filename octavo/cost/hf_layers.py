"""Layers as families of Hugging Face configs describe them.

Each function makes one part of one layer: mixers, an MLP; or all windows of a model. Recurrences
are in ``hf_recurrences.py``, what only Gemma has in ``hf_gemma.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.cost.hf_config import TextConfig, Windows
from octavo.cost.mixers import Attention, Indexer, LatentAttention, Mixer
from octavo.cost.mlps import DenseMlp, ExpertMlp, Mlp

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
            has_output_gate=config.flag("attn_output_gate", family.has_output_gate),
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
            has_output_gate=config.flag("mla_use_output_gate", False),
        ),
    )


def selective_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    """Latent attention that looks at the keys that an indexer selects. Some layers of GLM take the
    selection of the one before."""
    config.skip("layer_types")  # all of them are indexed
    (latent,) = latent_attention(config, layer)
    assert isinstance(latent, LatentAttention)
    selecting = replace(latent, selected=config.integer("index_topk", 2048))
    if "indexer_types" in config and config.kinds("indexer_types", _INDEXERS)[layer] == "shared":
        return (selecting,)
    indexer = Indexer(
        heads=config.integer("index_n_heads", 64),
        head_dim=config.integer("index_head_dim", 128),
        q_rank=config.integer("q_lora_rank"),
    )
    return selecting, indexer


_INDEXERS = ("full", "shared")


# -- windows --------------------------------------------------------------------------------------


def no_windows(config: TextConfig) -> Windows:
    return (None,) * config.num_layers


def same_window(config: TextConfig) -> Windows:
    return (config.integer("sliding_window", None),) * config.num_layers


@dataclass(frozen=True, slots=True)
class WindowsByType:
    """``layer_types`` where a config has it; else each ``pattern``-th layer sees everything."""

    pattern: int
    default: int | None = None

    def __call__(self, config: TextConfig) -> Windows:
        window = config.integer("sliding_window", self.default)
        if "layer_types" in config:
            types = config.kinds("layer_types", ("sliding_attention", "full_attention"))
            return tuple(window if each == "sliding_attention" else None for each in types)
        every = config.integer("sliding_window_pattern", self.pattern)
        return tuple(window if (i + 1) % every else None for i in range(config.num_layers))


def chunks_but_every_fourth(config: TextConfig) -> Windows:
    """Llama 4: layers with positions attend within chunks, those without to everything."""
    config.skip("layer_types", "use_qk_norm")  # made of these; a norm without weights
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
    usual = config.integer("expansion_ratio", 4) * config.hidden
    return _dense_of(config, config.integer("intermediate_size", usual))


def _dense_of(config: TextConfig, inner: int) -> DenseMlp:
    family = config.family
    has_bias = config.flag(family.mlp_bias_field, family.mlp_bias)
    return DenseMlp(inner=inner, is_gated=family.is_gated, has_bias=has_bias)


def _experts_of(config: TextConfig, inner: int, shared: DenseMlp | None = None) -> ExpertMlp:
    family = config.family
    return ExpertMlp(
        num_experts=config.integer("num_experts"),
        per_token=config.of_layer("num_experts_per_tok", 0, family.experts_per_token),
        inner=inner,
        is_gated=family.is_gated,
        has_bias=family.mlp_bias,
        router_bias=family.router_bias,
        shared=shared,
        has_shared_gate=family.has_shared_gate and shared is not None,
        latent=config.integer("moe_latent_size", 0, minimum=0),
        has_latent_norm=config.flag("latent_moe_use_norm", False),
    )


def experts_everywhere(config: TextConfig, layer: int) -> Mlp:
    """Experts in all layers; their size is that of the model's MLP where they have no own."""
    inner = config.integer("moe_intermediate_size", None) or config.integer("intermediate_size")
    size = config.integer("shared_intermediate_size", 0, minimum=0)
    return _experts_of(config, inner, _dense_of(config, size) if size else None)


def qwen_experts(config: TextConfig, layer: int) -> Mlp:
    without = config.entries("mlp_only_layers") if "mlp_only_layers" in config else []
    if layer in without or (layer + 1) % config.integer("decoder_sparse_step", 1):
        return dense(config, layer)
    size = config.integer("shared_expert_intermediate_size", 0, minimum=0)
    shared = _dense_of(config, size) if size else None
    return _experts_of(config, config.integer("moe_intermediate_size"), shared)


def deepseek_experts(config: TextConfig, layer: int) -> Mlp:
    """The first layers are dense; shared experts are one MLP of their sizes together."""
    if not _has_experts(config, layer):
        return dense(config, layer)
    inner = config.integer("moe_intermediate_size")
    count = config.integer("n_shared_experts", 0, minimum=0)
    return _experts_of(config, inner, _dense_of(config, inner * count) if count else None)


def _has_experts(config: TextConfig, layer: int) -> bool:
    if "mlp_layer_types" in config:
        return config.kinds("mlp_layer_types", ("dense", "sparse"))[layer] == "sparse"
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    return layer >= first and not layer % config.integer("moe_layer_freq", 1)


def ernie_experts(config: TextConfig, layer: int) -> Mlp:
    """The types of layers that repeat from one layer to another, all or some."""
    first = config.integer("moe_layer_start_index", 1, minimum=0)
    last = config.integer("moe_layer_end_index", config.num_layers - 1, minimum=-1)
    is_between = first <= layer <= last % config.num_layers
    if not is_between or (layer + 1) % config.integer("moe_layer_interval", 1):
        return dense(config, layer)
    inner = config.integer("moe_intermediate_size")
    shared = inner * config.integer("n_shared_experts", 2, minimum=0)
    return _experts_of(config, inner, _dense_of(config, shared) if shared else None)


def hunyuan_experts(config: TextConfig, layer: int) -> Mlp:
    """Some facts are given for each layer, though they are the same in all."""
    inner = config.of_layer("intermediate_size", layer)
    shared = inner * config.of_layer("num_shared_expert", layer, 1)
    experts = _experts_of(config, inner, _dense_of(config, shared))
    return replace(experts, per_token=config.of_layer("num_experts_per_tok", layer, 1))


def jamba_experts(config: TextConfig, layer: int) -> Mlp:
    period = config.integer("expert_layer_period", 2)
    if layer % period != config.integer("expert_layer_offset", 1, minimum=0):
        return dense(config, layer)
    return experts_everywhere(config, layer)


def nothing(config: TextConfig, layer: int) -> Mlp | None:
    return None


def llama4_experts(config: TextConfig, layer: int) -> Mlp:
    step = config.integer("interleave_moe_layer_step", 1)
    if (layer + 1) % step:
        return _dense_of(config, config.integer("intermediate_size_mlp"))
    inner = config.integer("intermediate_size")
    return _experts_of(config, inner, _dense_of(config, inner))


# -- layers of one thing each ---------------------------------------------------------------------

_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_layers(config: TextConfig) -> list[str]:
    """The type of each layer, in either spelling."""
    name = "hybrid_override_pattern"
    if name not in config:
        return config.kinds("layers_block_type", _NEMOTRON_LETTERS.values())
    letters = config.text(name)
    if len(letters) != config.num_layers or not set(letters) <= set(_NEMOTRON_LETTERS):
        raise config.error(name, f"is not a letter of M*-E for each of {config.num_layers} layers")
    return [_NEMOTRON_LETTERS[letter] for letter in letters]


def nemotron_mlp(config: TextConfig, layer: int) -> Mlp | None:
    kind = nemotron_layers(config)[layer]
    if kind == "moe":
        count = config.integer("n_shared_experts", 1, minimum=0)
        size = config.integer("moe_shared_expert_intermediate_size") * count
        shared = _dense_of(config, size) if size else None
        return _experts_of(config, config.integer("moe_intermediate_size"), shared)
    return dense(config, layer) if kind == "mlp" else None
