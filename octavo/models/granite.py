"""Granite 3 and 4 (dense, and 3 with experts): Llama with four scales, chosen so that one recipe
trains all sizes: of embeddings, of scores, of what each half of a layer adds to the stream, and of
logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.fields import Fields
from octavo.models import experts as moe
from octavo.models.config import ModelConfig
from octavo.models.config_to_hf import shortest
from octavo.models.family import Family, HFNames
from octavo.models.llama import GGUF_EXPERT_NAMES, GGUF_NAMES, HF_DEFAULTS, LlamaForCausalLM


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    return {
        "embedding_scale": unless_one(fields.number("embedding_multiplier", 1.0)),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "residual_scale": unless_one(fields.number("residual_multiplier", 1.0)),
        "logit_scale": unless_one(1 / fields.number("logits_scaling", 1.0)),
    }


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    return {
        "embedding_multiplier": shortest(config.embedding_scale or 1.0),
        "attention_multiplier": shortest(config.attention_scale),
        "residual_multiplier": shortest(config.residual_scale or 1.0),
        "logits_scaling": 1 / (config.logit_scale or 1.0),
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    return {
        "embedding_scale": unless_one(fields.number("embedding_scale", 1.0)),
        "residual_scale": unless_one(fields.number("residual_scale", 1.0)),
        "logit_scale": unless_one(1 / fields.number("logit_scale", 1.0)),
    }


def _to_gguf(config: ModelConfig) -> Mapping[str, Any]:
    return {
        "embedding_scale": config.embedding_scale or 1.0,
        "attention.scale": config.attention_scale,
        "residual_scale": config.residual_scale or 1.0,
        "logit_scale": 1 / (config.logit_scale or 1.0),
    }


def unless_one(factor: float) -> float | None:
    """A factor, None for one that changes nothing."""
    return None if factor == 1.0 else factor


GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    model=LlamaForCausalLM,
    gguf="granite",
    gguf_names=GGUF_NAMES,
    gguf_interleaved=True,
    hf_defaults={**HF_DEFAULTS, "max_position_embeddings": 2048},
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=_from_gguf,
    to_gguf=_to_gguf,
)

_UP = "mlp.experts.N.gate_up_proj"
MOE_NAMES = {
    "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.input_linear": _UP,
    "block_sparse_moe.output_linear": "mlp.experts.N.down_proj",
}
GRANITE_MOE = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    model=LlamaForCausalLM,
    gguf="granitemoe",
    hf_names=HFNames(layer=MOE_NAMES),
    gguf_names=GGUF_EXPERT_NAMES,
    fused={_UP: ("mlp.experts.N.gate_proj", "mlp.experts.N.up_proj")},
    gguf_interleaved=True,
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    from_hf=lambda fields, config: {
        **_from_hf(fields, config),
        "experts": moe.from_hf(fields, config, inner="intermediate_size"),
    },
    to_hf=lambda config: {**_to_hf(config), **moe.to_hf(config, "num_local_experts")},
    from_gguf=lambda fields, config: {
        **_from_gguf(fields, config),
        "experts": moe.from_gguf(fields, config, normalize=True),
    },
    to_gguf=lambda config: {**_to_gguf(config), **moe.to_gguf(config)},
)
