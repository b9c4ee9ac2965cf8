"""Qwen 2 and Qwen 3 with experts: Llama's layers, of which most have experts in place of an MLP.

Qwen 2 has an MLP beside them that all tokens use, scaled by a number a token behind a sigmoid.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from octavo.base.fields import Fields
from octavo.models import experts as moe
from octavo.models.config import ExpertsConfig, ModelConfig
from octavo.models.family import Family, HFNames
from octavo.models.llama import (
    GGUF_EXPERT_NAMES,
    HF_DEFAULTS,
    LlamaForCausalLM,
    qwen_window_entries,
    qwen_windows,
)

_DEFAULTS = {
    **HF_DEFAULTS,
    "max_position_embeddings": 32_768,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
}


SHARED_EXPERT = {
    f"mlp.shared_expert.{projection}": f"mlp.shared_experts.{projection}"
    for projection in ("gate_proj", "up_proj", "down_proj")
}


def expert_layers(fields: Fields, config: ModelConfig) -> tuple[bool, ...]:
    """All have experts but those in ``mlp_only_layers``, and with a step, those between."""
    step = fields.integer("decoder_sparse_step", 1)
    without = fields.each("mlp_only_layers", partial(Fields.integer, minimum=0))
    return tuple(
        index not in without and (index + 1) % step == 0 for index in range(config.num_layers)
    )


def qwen_experts(fields: Fields, config: ModelConfig, shared: bool) -> ExpertsConfig:
    """The experts of a config; ``shared``: beside an MLP that all tokens use, with a gate."""
    beside: dict[str, Any] = {}
    if shared:
        inner = fields.integer("shared_expert_intermediate_size")
        beside = {"shared_inner": inner, "shared_gate": True}
    routing = {"normalize": fields.boolean("norm_topk_prob")}
    layers = expert_layers(fields, config)
    return moe.from_hf(fields, config, layers=layers, routing=routing, **beside)


def qwen_expert_entries(config: ModelConfig) -> dict[str, Any]:
    """Write the fields that ``qwen_experts`` reads."""
    entries = moe.to_hf(config, "num_experts", "moe_intermediate_size")
    assert config.experts is not None
    without = [index for index, has in enumerate(config.experts.layers) if not has]
    entries |= {"mlp_only_layers": without, "decoder_sparse_step": 1}
    if config.experts.shared_inner:
        entries["shared_expert_intermediate_size"] = config.experts.shared_inner
    return {**entries, "norm_topk_prob": config.experts.routing.normalize}


def _qwen2_from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    return {
        "attention_bias": fields.boolean("qkv_bias", True),
        "attention_output_bias": False,
        "layer_windows": qwen_windows(fields, config),
        "experts": qwen_experts(fields, config, shared=True),
    }


def _qwen3_from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    return {
        "qk_norm": True,
        "layer_windows": qwen_windows(fields, config),
        "experts": qwen_experts(fields, config, shared=False),
    }


def _entries(config: ModelConfig) -> dict[str, Any]:
    return {**qwen_expert_entries(config), **qwen_window_entries(config)}


QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    model=LlamaForCausalLM,
    gguf="qwen2moe",
    gguf_needs_head=True,
    hf_names=HFNames(layer=SHARED_EXPERT),
    gguf_names=GGUF_EXPERT_NAMES,
    hf_defaults={
        **_DEFAULTS,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    from_hf=_qwen2_from_hf,
    to_hf=lambda config: {**_entries(config), "qkv_bias": config.attention_bias},
    from_gguf=lambda fields, config: {
        "experts": moe.from_gguf(fields, config, normalize=False, shared_gate=True)
    },
    to_gguf=moe.to_gguf,
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    model=LlamaForCausalLM,
    gguf="qwen3moe",
    gguf_names=GGUF_EXPERT_NAMES,
    hf_defaults={
        **_DEFAULTS,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    from_hf=_qwen3_from_hf,
    to_hf=_entries,
    from_gguf=lambda fields, config: {"experts": moe.from_gguf(fields, config, normalize=True)},
    to_gguf=moe.to_gguf,
)
