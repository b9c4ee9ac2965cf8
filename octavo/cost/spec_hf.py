"""ModelSpec from Hugging Face's ``config.json``: many families, each with its own spellings.

A family is what its configs do not say: which norms and biases there are, what its attention and
its MLPs are made of. All are rows of ``_FAMILIES``, by ``model_type``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from octavo.cost.mixers import Attention, GatedDeltaNet, LatentAttention, Mamba2, Mixer
from octavo.cost.mlps import DenseMlp, ExpertMlp, Mlp
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.errors import UnsupportedModelError
from octavo.fields import Fields

_MAX_LAYERS = 1024

# What families call the same thing.
_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "num_experts_per_tok": ("experts_per_token", "num_experts_per_token", "moe_topk"),
    "moe_intermediate_size": ("expert_intermediate_size",),
}

MixersOf = Callable[["_Config", int], tuple[Mixer, ...]]
MlpOf = Callable[["_Config", int], Mlp | None]


class _Config(Fields):
    """The text part of a config under one spelling, and the family that it is of."""

    family: _Family

    @property
    def hidden(self) -> int:
        return int(self.integer("hidden_size"))

    @property
    def num_layers(self) -> int:
        return int(self.integer("num_hidden_layers", maximum=_MAX_LAYERS))

    @property
    def heads(self) -> int:
        return int(self.integer("num_attention_heads"))

    @property
    def head_dim(self) -> int:
        return int(self.integer("head_dim", max(self.hidden // self.heads, 1)))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.boolean(name, default))


# -- attention ------------------------------------------------------------------------------------


def _attention(config: _Config, layer: int) -> tuple[Mixer, ...]:
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
            window=family.windows(config)[layer],
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


def _kv_heads(config: _Config) -> int:
    if config.family.multi_query and config.flag("multi_query", True):
        return 1
    return int(config.integer("num_key_value_heads", config.heads))


def _latent_attention(config: _Config, layer: int) -> tuple[Mixer, ...]:
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


def _delta_net_or_attention(config: _Config, layer: int) -> tuple[Mixer, ...]:
    if _layer_type(config, layer) == "full_attention":
        return _attention(config, layer)
    return (
        GatedDeltaNet(
            heads=config.integer("linear_num_value_heads"),
            key_heads=config.integer("linear_num_key_heads"),
            key_dim=config.integer("linear_key_head_dim"),
            value_dim=config.integer("linear_value_head_dim"),
            kernel=config.integer("linear_conv_kernel_dim"),
        ),
    )


def _layer_type(config: _Config, layer: int) -> str:
    if "layer_types" in config:
        return str(config.each("layer_types", Fields.text, config.num_layers)[layer])
    interval = config.integer("full_attention_interval", 4)
    return "linear_attention" if (layer + 1) % interval else "full_attention"


def _mamba2(config: _Config) -> Mamba2:
    """As Bamba and Granite have it; the inner size is a multiple of the hidden one."""
    heads = config.integer("mamba_n_heads")
    inner = int(config.number("mamba_expand", 2.0) * config.hidden)
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


def _mamba_or_attention(config: _Config, layer: int) -> tuple[Mixer, ...]:
    if "layer_types" in config:
        is_attention = _layer_type(config, layer) == "attention"
    else:
        is_attention = layer in config.each("attn_layer_indices", _index)
    return _attention(config, layer) if is_attention else (_mamba2(config),)


def _index(fields: Fields, name: str) -> int:
    return int(fields.integer(name, minimum=0))


def _nemotron_mixer(config: _Config, layer: int) -> tuple[Mixer, ...]:
    """Layers of one thing each, by a letter: M is Mamba 2, * attention, - an MLP, E experts."""
    letter = config.text("hybrid_override_pattern")[layer]
    if letter == "*":
        return _attention(config, layer)
    if letter != "M":
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


# -- windows --------------------------------------------------------------------------------------

Windows = tuple[int | None, ...]


def _no_windows(config: _Config) -> Windows:
    return (None,) * config.num_layers


def _same_window(config: _Config) -> Windows:
    return (config.integer("sliding_window", None),) * config.num_layers


def _windows_by_type(pattern: int, default: int | None = None) -> Callable[[_Config], Windows]:
    """``layer_types`` where a config has it; else each ``pattern``-th layer sees everything."""

    def windows(config: _Config) -> Windows:
        window = config.integer("sliding_window", default)
        if "layer_types" in config:
            types = config.each("layer_types", Fields.text, config.num_layers)
            return tuple(window if each == "sliding_attention" else None for each in types)
        every = config.integer("sliding_window_pattern", None) or config.integer(
            "_sliding_window_pattern", pattern
        )
        return tuple(window if (i + 1) % every else None for i in range(config.num_layers))

    return windows


def _windows_if_used(config: _Config) -> Windows:
    """Qwen's: only with ``use_sliding_window``, and from ``max_window_layers`` on."""
    if not config.flag("use_sliding_window", False):
        return _no_windows(config)
    first = config.integer("max_window_layers", 28, minimum=0)
    window = config.integer("sliding_window", None)
    return tuple(window if i >= first else None for i in range(config.num_layers))


def _chunks_but_every_fourth(config: _Config) -> Windows:
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


def _dense(config: _Config, layer: int) -> Mlp:
    inner = config.integer("intermediate_size", 4 * config.hidden)
    return _dense_of(config, inner)


def _dense_of(config: _Config, inner: int) -> DenseMlp:
    family = config.family
    has_bias = config.flag(family.mlp_bias_field, family.mlp_bias)
    return DenseMlp(inner=inner, is_gated=family.is_gated, has_bias=has_bias)


def _experts_of(config: _Config, inner: int, shared: DenseMlp | None = None) -> ExpertMlp:
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


def _experts_everywhere(config: _Config, layer: int) -> Mlp:
    """Experts in all layers; their size is that of the model's MLP where they have no own."""
    inner = config.integer("moe_intermediate_size", None) or config.integer("intermediate_size")
    size = config.integer("shared_intermediate_size", 0, minimum=0)
    return _experts_of(config, inner, _dense_of(config, size) if size else None)


def _experts_or_dense(config: _Config, layer: int) -> Mlp:
    """Granite's: experts if there are any, beside an MLP that is always there."""
    if config.integer("num_experts", 0, minimum=0):
        return _experts_everywhere(config, layer)
    return _dense_of(config, config.integer("shared_intermediate_size"))


def _qwen_experts(config: _Config, layer: int) -> Mlp:
    dense = config.entries("mlp_only_layers") if "mlp_only_layers" in config else []
    if layer in dense or (layer + 1) % config.integer("decoder_sparse_step", 1):
        return _dense(config, layer)
    size = config.integer("shared_expert_intermediate_size", 0, minimum=0)
    shared = _dense_of(config, size) if size else None
    return _experts_of(config, config.integer("moe_intermediate_size"), shared)


def _deepseek_experts(config: _Config, layer: int) -> Mlp:
    """The first layers are dense; shared experts are one MLP of their sizes together."""
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    if layer < first or layer % config.integer("moe_layer_freq", 1):
        return _dense(config, layer)
    inner = config.integer("moe_intermediate_size")
    count = config.integer("n_shared_experts", 0, minimum=0)
    return _experts_of(config, inner, _dense_of(config, inner * count) if count else None)


def _llama4_experts(config: _Config, layer: int) -> Mlp:
    step = config.integer("interleave_moe_layer_step", 1)
    if (layer + 1) % step:
        return _dense_of(config, config.integer("intermediate_size_mlp"))
    inner = config.integer("intermediate_size")
    return _experts_of(config, inner, _dense_of(config, inner))


def _nemotron_mlp(config: _Config, layer: int) -> Mlp | None:
    letter = config.text("hybrid_override_pattern")[layer]
    if letter == "E":
        size = config.integer("moe_shared_expert_intermediate_size")
        return _experts_of(config, config.integer("moe_intermediate_size"), _dense_of(config, size))
    return _dense(config, layer) if letter == "-" else None


# -- families -------------------------------------------------------------------------------------

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a config leaves to the name of its kind.

    Args:
        norms: of the hidden size in each layer; of a layer of one part, there are fewer.
        norm_bias: these have one.
        final_norms: after (or before) all layers.
        bias_field: what says whether queries, keys and values have biases; it is ``qkv_bias``
            where the field is absent, or has no name.
        output_bias: of attention; None is like ``qkv_bias``.
        qk_norm: whether queries and keys are normed, each head by the same values or all by own.
        extra_positions: rows of learned positions beyond ``max_position_embeddings``; None
            where positions are not learned.
        defaults: what a field means that is absent.
    """

    norms: int = 2
    norm_bias: bool = False
    final_norms: int = 1
    is_gated: bool = True
    qkv_bias: bool = False
    output_bias: bool | None = None
    bias_field: str = "attention_bias"
    mlp_bias: bool = False
    mlp_bias_field: str = "mlp_bias"
    head_bias: bool = False
    qk_norm: QkNorm | Callable[[_Config], QkNorm] = "none"
    multi_query: bool = False
    has_output_gate: bool = False
    has_sinks: bool = False
    router_bias: bool = False
    has_shared_gate: bool = False
    experts_per_token: int = 2
    extra_positions: int | None = None
    tie: bool = False
    windows: Callable[[_Config], Windows] = _no_windows
    mixers: MixersOf = _attention
    mlp: MlpOf = _dense
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _if_asked(name: str, kind: QkNorm) -> Callable[[_Config], QkNorm]:
    return lambda config: kind if config.flag(name, False) else "none"


def _biased(**more: Any) -> _Family:
    """Of the time of GPT-2: norms with biases, an MLP without a gate, biases everywhere."""
    facts: dict[str, Any] = {
        "norm_bias": True,
        "is_gated": False,
        "qkv_bias": True,
        "bias_field": "",
        "mlp_bias": True,
        **more,
    }
    return _Family(**facts)


_LLAMA = _Family()
_GEMMA3 = _Family(
    norms=4,
    qk_norm="head",
    tie=True,
    windows=_windows_by_type(6, 4096),
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
)
_QWEN3_NEXT = _Family(
    qk_norm="head",
    has_output_gate=True,
    has_shared_gate=True,
    mixers=_delta_net_or_attention,
    mlp=_qwen_experts,
)
_QWEN35 = _Family(qk_norm="head", has_output_gate=True, mixers=_delta_net_or_attention)
_DEEPSEEK3 = _Family(mixers=_latent_attention, mlp=_deepseek_experts, router_bias=True)
_GRANITE_EXPERTS = _Family(mlp=_experts_everywhere)
_FALCON = _Family(
    norms=1,
    norm_bias=True,
    is_gated=False,
    tie=True,
    multi_query=True,
    bias_field="bias",
    mlp_bias_field="bias",
    defaults={"max_position_embeddings": 2048},
)
_FALCON_40B = _Family(
    norms=2,
    norm_bias=True,
    is_gated=False,
    tie=True,
    bias_field="bias",
    mlp_bias_field="bias",
    defaults={"max_position_embeddings": 2048},
)

_FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _Family(windows=_same_window),
    "ministral": _Family(windows=_windows_by_type(1)),
    "mixtral": _Family(windows=_same_window, mlp=_experts_everywhere),
    "qwen2": _Family(qkv_bias=True, bias_field="", output_bias=False, windows=_windows_if_used),
    "qwen2_moe": _Family(
        qkv_bias=True,
        bias_field="",
        output_bias=False,
        has_shared_gate=True,
        windows=_windows_if_used,
        mlp=_qwen_experts,
    ),
    "qwen3": _Family(qk_norm="head", windows=_windows_if_used, defaults={"head_dim": 128}),
    "qwen3_moe": _Family(qk_norm="head", windows=_windows_if_used, mlp=_qwen_experts),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN3_NEXT,
    "gemma": _Family(tie=True),
    "gemma2": _Family(norms=4, tie=True, windows=_windows_by_type(2, 4096)),
    "gemma3": _GEMMA3,
    "phi": _biased(norms=1, head_bias=True),
    "phi3": _Family(windows=_same_window),
    "phimoe": _Family(
        norm_bias=True,
        head_bias=True,
        windows=_same_window,
        mlp=_experts_everywhere,
    ),
    "gpt2": _biased(tie=True, extra_positions=0),
    "gpt_bigcode": _biased(tie=True, extra_positions=0, multi_query=True),
    "gpt_neox": _biased(bias_field="attention_bias"),
    "opt": _biased(tie=True, extra_positions=2),
    "bloom": _biased(tie=True, final_norms=2, defaults={"max_position_embeddings": 2048}),
    "starcoder2": _biased(
        bias_field="use_bias", mlp_bias_field="use_bias", tie=True, windows=_same_window
    ),
    "falcon": _FALCON,
    "cohere": _Family(norms=1, tie=True, qk_norm=_if_asked("use_qk_norm", "full")),
    "cohere2": _Family(norms=1, tie=True, windows=_windows_by_type(4, 4096)),
    "olmo2": _Family(qk_norm="full"),
    "olmoe": _Family(qk_norm="full", mlp=_experts_everywhere),
    "deepseek_v2": _Family(mixers=_latent_attention, mlp=_deepseek_experts),
    "deepseek_v3": _DEEPSEEK3,
    "kimi_k2": _DEEPSEEK3,
    "glm4": _Family(norms=4, output_bias=False),
    "glm4_moe": _Family(
        output_bias=False,
        qk_norm=_if_asked("use_qk_norm", "head"),
        mlp=_deepseek_experts,
        router_bias=True,
    ),
    "glm4_moe_lite": _DEEPSEEK3,
    "gpt_oss": _Family(
        qkv_bias=True,
        mlp_bias=True,
        router_bias=True,
        has_sinks=True,
        windows=_windows_by_type(2, 128),
        mlp=_experts_everywhere,
    ),
    "llama4": _Family(windows=_chunks_but_every_fourth, mlp=_llama4_experts, experts_per_token=1),
    "granite": _LLAMA,
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoeshared": _GRANITE_EXPERTS,
    "granitemoehybrid": _Family(mixers=_mamba_or_attention, mlp=_experts_or_dense),
    "bamba": _Family(mixers=_mamba_or_attention),
    "nemotron": _Family(norm_bias=True, is_gated=False),
    "nemotron_h": _Family(
        norms=1, is_gated=False, router_bias=True, mixers=_nemotron_mixer, mlp=_nemotron_mlp
    ),
    "minimax_m2": _Family(qk_norm="full", mlp=_experts_everywhere, router_bias=True),
    "seed_oss": _Family(qkv_bias=True, output_bias=False),
    "smollm3": _LLAMA,
    "stablelm": _Family(norm_bias=True, bias_field="use_qkv_bias", output_bias=False),
}
# Other names of the same: a text model that is part of one that sees, or of another company.
_SAME = {
    "llama4_text": "llama4",
    "gemma3_text": "gemma3",
    "mistral3": "mistral",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k25": "deepseek_v3",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
}


def parse(config: Mapping[str, Any], path: Path) -> ModelSpec:
    """See ``ModelSpec.of_hf``."""
    fields = _open(config, path)
    family = fields.family
    layers: dict[LayerSpec, LayerSpec] = {}  # layers alike are one object
    made = [_layer(fields, index) for index in range(fields.num_layers)]
    positions = fields.integer("max_position_embeddings", 2048)
    norm = fields.hidden * (2 if family.norm_bias else 1)
    return ModelSpec(
        name=path.parent.name or path.stem,
        hidden_size=fields.hidden,
        vocab_size=fields.integer("vocab_size"),
        layers=tuple(layers.setdefault(layer, layer) for layer in made),
        tie_embeddings=fields.flag("tie_word_embeddings", family.tie),
        max_position=positions,
        final_norm_size=family.final_norms * norm,
        learned_positions=(
            0 if family.extra_positions is None else positions + family.extra_positions
        ),
        head_bias=family.head_bias,
        dtype=fields.text("torch_dtype", None) or fields.text("dtype", "bfloat16"),
        quantization=_quantization(config, path),
    )


def _open(config: Mapping[str, Any], path: Path) -> _Config:
    outer = Fields(path, config)
    inner = outer.table("text_config", {})
    values = {**config, **{k: v for k, v in inner.items() if v is not None}}
    kind = Fields(path, inner).text("model_type", None) or outer.text("model_type")
    kind = _SAME.get(kind, kind)
    family = _FAMILIES.get(kind)
    if kind == "falcon" and values.get("new_decoder_architecture"):
        family = _FALCON_40B
    if family is None:
        near = get_close_matches(kind, _FAMILIES, 3)
        raise UnsupportedModelError(
            f"{path}: models of type {kind!r:.80} cannot be planned"
            + (f"; do you mean {' or '.join(near)}?" if near else "")
        )
    for name, others in _SPELLINGS.items():
        for other in others:
            if values.get(name) is None and values.get(other) is not None:
                values[name] = values[other]
    fields = _Config(path, {**family.defaults, **values})
    fields.family = family
    return fields


def _layer(config: _Config, index: int) -> LayerSpec:
    family = config.family
    return LayerSpec(
        mixers=family.mixers(config, index),
        mlp=family.mlp(config, index),
        norm_size=family.norms * config.hidden * (2 if family.norm_bias else 1),
    )


def _quantization(config: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
    for section in (config, Fields(path, config).table("text_config", {})):
        found = Fields(path, section).table("quantization_config", None)
        if found:
            return dict(found)
    return None
