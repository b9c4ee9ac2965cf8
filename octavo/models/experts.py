"""Experts in model files: the part of a family's ``from_hf``, ``to_hf``, ``from_gguf`` and
``to_gguf`` that most families with experts share. They import it as ``moe``.

An ``N`` in ``mlp.experts.N.gate_proj`` stands for the number of each expert; see ``TensorNames``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.kernels.routing import Routing
from octavo.models.config import ExpertsConfig, ModelConfig

GGUF_LAYER = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.N.gate_proj",
    "ffn_up_exps": "mlp.experts.N.up_proj",
    "ffn_down_exps": "mlp.experts.N.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

# Of ``expert_gating_func``.
_GGUF_SCORING = {1: "softmax", 2: "sigmoid"}
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


# -- config.json ----------------------------------------------------------------------------------


def from_hf(
    fields: Fields,
    config: ModelConfig,
    *,
    inner: str = "moe_intermediate_size",
    layers: Sequence[bool] | None = None,
    routing: dict[str, Any] | None = None,
    **more: Any,
) -> ExpertsConfig:
    """The experts of a ``config.json``.

    Args:
        inner: the key of an expert's intermediate size.
        layers: for each layer, whether it has experts; None: all have.
        routing: fields of ``Routing`` that are not its default. more: fields of ``ExpertsConfig``.
    """
    name = next((name for name in _NUM_EXPERTS if name in fields), _NUM_EXPERTS[0])
    return ExpertsConfig(
        routing=Routing(
            num_experts=fields.integer(name),
            top_k=fields.integer("num_experts_per_tok"),
            **(routing or {}),
        ),
        inner=fields.integer(inner),
        layers=tuple(layers or (True,) * config.num_layers),
        **{"activation": config.activation, **more},
    )


def to_hf(config: ModelConfig, name: str, inner: str = "intermediate_size") -> dict[str, Any]:
    """Write the fields that ``from_hf`` reads; ``name`` is the family's key for the number of
    experts."""
    experts = _experts_of(config)
    return {
        name: experts.routing.num_experts,
        "num_experts_per_tok": experts.routing.top_k,
        inner: experts.inner,
    }


def from_hf_grouped(
    fields: Fields,
    config: ModelConfig,
    layers: Sequence[bool],
    *,
    by_sigmoid: bool,
    is_grouped: bool = True,
) -> ExpertsConfig:
    """The experts of DeepSeek's kind of config.

    Args:
        layers: of each layer, whether it has experts.
        by_sigmoid: the router takes sigmoids with a correction, as DeepSeek-V3's; else softmax.
        is_grouped: the best groups of experts are chosen first.
    """
    groups = fields.integer("n_group", 1) if is_grouped else 1
    inner = fields.integer("moe_intermediate_size")
    return from_hf(
        fields,
        config,
        layers=layers,
        routing={
            "scoring": "sigmoid" if by_sigmoid else "softmax",
            "normalize": by_sigmoid and fields.boolean("norm_topk_prob", True),
            "scale": fields.number("routed_scaling_factor", 1.0),
            "num_groups": groups,
            "top_groups": fields.integer("topk_group", 1) if is_grouped else 1,
            "group_top": 2 if by_sigmoid and groups > 1 else 1,
        },
        correction=by_sigmoid,
        shared_inner=fields.integer("n_shared_experts", 0, minimum=0) * inner,
    )


def to_hf_grouped(config: ModelConfig) -> dict[str, Any]:
    """Write the fields that ``from_hf_grouped`` reads, and how many layers have none."""
    experts = _experts_of(config)
    return {
        **to_hf(config, "n_routed_experts", "moe_intermediate_size"),
        "first_k_dense_replace": experts.layers.index(True),
        "norm_topk_prob": experts.routing.normalize,
        "routed_scaling_factor": experts.routing.scale,
        "n_group": experts.routing.num_groups,
        "topk_group": experts.routing.top_groups,
        "n_shared_experts": experts.shared_inner // experts.inner,
    }


# -- GGUF -----------------------------------------------------------------------------------------


def from_gguf(
    fields: Fields, config: ModelConfig, *, normalize: bool, **more: Any
) -> ExpertsConfig | None:
    """The experts of a GGUF file, in all layers; None if it has none.

    Args:
        normalize: whether llama.cpp normalizes the weights of the chosen experts in this family.
        more: fields of ``ExpertsConfig``.
    """
    if not fields.integer("expert_count", 0, minimum=0):
        return None
    return ExpertsConfig(
        routing=Routing(
            num_experts=fields.integer("expert_count"),
            top_k=fields.integer("expert_used_count"),
            normalize=normalize,
        ),
        inner=fields.integer("expert_feed_forward_length", config.intermediate_size),
        layers=(True,) * config.num_layers,
        shared_inner=fields.integer("expert_shared_feed_forward_length", 0, minimum=0),
        **{"activation": config.activation, **more},
    )


def from_gguf_grouped(fields: Fields, config: ModelConfig, **more: Any) -> ExpertsConfig:
    """The experts of a GGUF file of DeepSeek's kind, which has the scoring, the groups, and the
    number of dense layers before the first with experts."""
    inner = fields.integer("expert_feed_forward_length")
    first = fields.integer("leading_dense_block_count", 0, minimum=0)
    groups, scoring = fields.integer("expert_group_count", 1), _gguf_scoring(fields)
    return ExpertsConfig(
        routing=Routing(
            num_experts=fields.integer("expert_count"),
            top_k=fields.integer("expert_used_count"),
            scoring=scoring,
            normalize=fields.boolean("expert_weights_norm", False),
            scale=fields.number("expert_weights_scale", 1.0),
            num_groups=groups,
            top_groups=fields.integer("expert_group_used_count", 1),
            group_top=2 if groups > 1 and scoring == "sigmoid" else 1,
        ),
        inner=inner,
        layers=tuple(index >= first for index in range(config.num_layers)),
        shared_inner=inner * fields.integer("expert_shared_count", 0, minimum=0),
        **{"activation": config.activation, **more},
    )


def to_gguf(config: ModelConfig) -> dict[str, Any]:
    """Write the keys that ``from_gguf`` reads."""
    experts = _experts_of(config)
    entries: dict[str, Any] = {
        "expert_count": experts.routing.num_experts,
        "expert_used_count": experts.routing.top_k,
        "expert_feed_forward_length": experts.inner,
    }
    if experts.shared_inner:
        entries["expert_shared_feed_forward_length"] = experts.shared_inner
    return entries


def to_gguf_grouped(config: ModelConfig) -> dict[str, Any]:
    """Write the keys that ``from_gguf_grouped`` reads."""
    experts, entries = _experts_of(config), to_gguf(config)
    routing = experts.routing
    func = next(func for func, name in _GGUF_SCORING.items() if name == routing.scoring)
    entries |= {
        "expert_shared_count": experts.shared_inner // experts.inner,
        "expert_gating_func": func,
        "expert_weights_norm": routing.normalize,
        "expert_weights_scale": routing.scale,
        "leading_dense_block_count": experts.layers.index(True),
    }
    if routing.num_groups > 1:
        entries["expert_group_count"] = routing.num_groups
        entries["expert_group_used_count"] = routing.top_groups
    return entries


def _gguf_scoring(fields: Fields) -> Any:
    func = fields.integer("expert_gating_func", 1)
    if func not in _GGUF_SCORING:
        raise UnsupportedModelError(
            f"{fields.path}: experts of the gating function {func} are not supported, but 1 "
            "(softmax) and 2 (sigmoid) are"
        )
    return _GGUF_SCORING[func]


def _experts_of(config: ModelConfig) -> ExpertsConfig:
    if config.experts is None:
        raise UnsupportedModelError(f"{config.name}: a {config.architecture} without experts")
    return config.experts
