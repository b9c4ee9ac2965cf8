"""Parts that only Gemma 3n and Gemma 4 have: inputs for each layer, layers that share the KV of
others, keys that are values too, and (3n) several residual streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from octavo.cost.hf_config import TextConfig
from octavo.cost.mixers import Attention, Mixer
from octavo.cost.mlps import DenseMlp, ExpertMlp, Mlp
from octavo.cost.weight_shape import WeightShape


def gemma3n_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    return (_borrowing(config, layer, _attention(config, layer)),)


def gemma4_attention(config: TextConfig, layer: int) -> tuple[Mixer, ...]:
    """Layers that see everything have larger heads, and may have fewer of keys, without values.
    Newer configs say so of each such layer."""
    found = _attention(config, layer)
    if found.window is None:
        is_tied = config.flag("attention_k_eq_v", False)
        found = replace(found, value_is_key=is_tied)
        if "per_layer_config" not in config:
            kv_heads = config.integer("num_global_key_value_heads", None) if is_tied else None
            head_dim = config.integer("global_head_dim", 512)
            found = replace(found, head_dim=head_dim, kv_heads=kv_heads or found.kv_heads)
    return (_borrowing(config, layer, found),)


def _attention(config: TextConfig, layer: int) -> Attention:
    return Attention(
        heads=config.heads,
        kv_heads=config.integer("num_key_value_heads", config.heads),
        head_dim=config.integer("head_dim", 256),
        window=config.windows[layer],
    )


def _borrowing(config: TextConfig, layer: int, found: Attention) -> Attention:
    """Norms of queries and keys are of a head each."""
    if _borrows(config, layer):
        return replace(found, borrows_kv=True, qk_norm_size=found.head_dim)
    return replace(found, qk_norm_size=2 * found.head_dim)


def _borrows(config: TextConfig, layer: int) -> bool:
    borrowing = int(config.integer("num_kv_shared_layers", 0, minimum=0))
    return layer >= config.num_layers - borrowing


def gemma3n_mlp(config: TextConfig, layer: int) -> Mlp:
    return DenseMlp(inner=config.of_layer("intermediate_size", layer))


def gemma4_mlp(config: TextConfig, layer: int) -> Mlp:
    """Layers that borrow may have twice the size; with experts, these are beside it."""
    is_wide = config.flag("use_double_wide_mlp", False) and _borrows(config, layer)
    dense = DenseMlp(inner=config.integer("intermediate_size") * (2 if is_wide else 1))
    if not config.flag("enable_moe_block", False):
        return dense
    return ExpertMlp(
        num_experts=config.integer("num_experts"),
        per_token=config.integer("num_experts_per_tok"),
        inner=config.integer("moe_intermediate_size"),
        shared=dense,
    )


def gemma3n_beside(config: TextConfig, layer: int) -> tuple[WeightShape, ...]:
    """Alternating updates of the streams (AltUp), a low-rank path (LAuReL), inputs of the layer."""
    hidden, streams = config.hidden, config.integer("altup_num_inputs", 4)
    rank = config.integer("laurel_rank", 64)
    return (
        WeightShape("altup.modality_router", "router", streams, hidden, "beside.router"),
        WeightShape("altup.coefficients", "norm", streams * streams * (streams + 1)),
        WeightShape("laurel.linear_left", "mlp", rank, hidden, "beside.laurel_in"),
        WeightShape("laurel.linear_right", "mlp", hidden, rank, "beside.laurel_out"),
        WeightShape("beside.norms", "norm", 3 * hidden),
        *_per_layer_input(config),
    )


def gemma4_beside(config: TextConfig, layer: int) -> tuple[WeightShape, ...]:
    """A scale, inputs of the layer; with experts, three norms more, and scales of the router."""
    scales = 1
    if config.flag("enable_moe_block", False):
        scales += 4 * config.hidden + config.integer("num_experts")
    return (*_per_layer_input(config), WeightShape("beside.scales", "norm", scales))


def _per_layer_input(config: TextConfig) -> Iterator[WeightShape]:
    hidden, size = config.hidden, _input_size(config)
    if size:
        yield WeightShape("per_layer_input_gate", "mlp", size, hidden, "beside.input_gate")
        yield WeightShape("per_layer_projection", "mlp", hidden, size, "beside.input_out")
        yield WeightShape("post_per_layer_input_norm", "norm", hidden)


def gemma4_inputs(config: TextConfig) -> tuple[WeightShape, ...]:
    """An embedding for each layer, and a projection of the usual one to as many values."""
    size = _input_size(config)
    if not size:
        return ()
    all_layers = size * config.num_layers
    rows = config.integer("vocab_size_per_layer_input", 262_144)
    return (
        WeightShape("model.embed_tokens_per_layer", "embedding", rows, all_layers),
        WeightShape(
            "model.per_layer_model_projection", "mlp", all_layers, config.hidden, "inputs.project"
        ),
        WeightShape("model.per_layer_projection_norm", "norm", size),
    )


def gemma3n_inputs(config: TextConfig) -> tuple[WeightShape, ...]:
    """Weights from one residual stream to the others, and back."""
    streams = 2 * (config.integer("altup_num_inputs", 4) - 1)
    hidden = config.hidden
    projections = WeightShape(
        "model.altup_projections", "mlp", streams * hidden, hidden, "inputs.streams"
    )
    return (*gemma4_inputs(config), projections)


def _input_size(config: TextConfig) -> int:
    return int(config.integer("hidden_size_per_layer_input", 256, minimum=0))
