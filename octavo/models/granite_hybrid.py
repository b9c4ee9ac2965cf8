"""Granite 4 hybrid: nine layers of Mamba 2 to one that attends, most of them without positions, and
the scales of Granite 3. All have an MLP, and larger models experts beside it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.recurrent import Mamba2
from octavo.models import experts as moe
from octavo.models import mamba2
from octavo.models.config import ExpertsConfig, ModelConfig
from octavo.models.config_gguf import gguf_recurrent_layers
from octavo.models.decoder import DecoderForCausalLM, make_mlp
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.granite import GRANITE, GRANITE_MOE, MOE_NAMES
from octavo.models.hybrid import HybridDecoderLayer, gguf_heads, hf_layer_types, hf_layers_of
from octavo.models.ignored_keys import always, beside, only, without
from octavo.models.llama import GGUF_LAYER, GGUF_TOP, HF_DEFAULTS


class SharedMLP(Module):
    """The MLP that all tokens use, where there are no experts beside it."""

    def __init__(self, config: ModelConfig):
        self.shared_experts = GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation
        )

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        fed: Activations = self.shared_experts(x, ctx)
        return fed


class GraniteHybridDecoderLayer(HybridDecoderLayer):
    mixer_type = Mamba2

    def make_mlp(self, config: ModelConfig, index: int) -> Module:
        return SharedMLP(config) if config.experts is None else make_mlp(config, index)


class GraniteHybridForCausalLM(DecoderForCausalLM):
    layer_type = GraniteHybridDecoderLayer


# -- files ----------------------------------------------------------------------------------------

_SHARED = "mlp.shared_experts.gate_up_proj"
HF_NAMES = HFNames(
    layer={
        **MOE_NAMES,
        "shared_mlp.input_linear": _SHARED,
        "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
        **mamba2.HF_LAYER,
    }
)
_RECURRENT = {"mamba", "linear_attention"}  # of transformers 4, and of 5
_ATTENDING = {"attention", "full_attention"}


_DENSE = {
    "ffn_gate": "mlp.shared_experts.gate_proj",
    "ffn_up": "mlp.shared_experts.up_proj",
    "ffn_down": "mlp.shared_experts.down_proj",
}


def _gguf_names(config: ModelConfig | None = None) -> TensorNames:
    """Tensor names for a config, or for any if it is None: a shared MLP has another name beside
    experts."""
    layer = {**GGUF_LAYER, **mamba2.GGUF_LAYER}
    if config is None or config.experts is None:
        layer |= _DENSE
    if config is None or config.experts is not None:
        layer |= moe.GGUF_LAYER
    groups = 1 if config is None else mamba2.spec_of(config).groups
    return TensorNames(GGUF_TOP, layer, fused={}, values=mamba2.gguf_values(groups))


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    layers = hf_layers_of(fields, config.num_layers, _RECURRENT, _ATTENDING, name)
    inner = fields.integer("mamba_expand") * config.hidden_size
    turns = fields.text("position_embedding_type", None) == "rope"
    return {
        **GRANITE.from_hf(fields, config),
        "intermediate_size": fields.integer("shared_intermediate_size"),
        "experts": _experts(fields, config),
        "unrotated_layers": () if turns else tuple(range(config.num_layers)),
        "recurrence": mamba2.from_hf(fields, config, layers, inner),
    }


def _is_no_limit(value: Any, values: Mapping[str, Any]) -> bool:
    """The limits "from 0 to infinity" as transformers writes them, as JSON has no infinity."""
    return value in ([0.0, inf], [0.0, {"__float__": "Infinity"}], (0.0, inf))


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig | None:
    if not fields.integer("num_local_experts", minimum=0):
        return None
    shared = fields.integer("shared_intermediate_size")
    return moe.from_hf(fields, config, inner="intermediate_size", shared_inner=shared)


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    mamba = mamba2.spec_of(config)
    experts: Mapping[str, Any] = {"num_local_experts": 0}
    if config.experts is not None:
        experts = moe.to_hf(config, "num_local_experts")
    return {
        **GRANITE.to_hf(config),
        **experts,
        "layer_types": hf_layer_types(config, "mamba", "attention"),
        "shared_intermediate_size": config.intermediate_size,
        "position_embedding_type": "rope" if config.turns_positions else "nope",
        "mamba_expand": mamba.width // config.hidden_size,
        **mamba2.to_hf(config),
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    experts = moe.from_gguf(fields, config, normalize=True)
    turns = fields.boolean("rope.scaling.finetuned", True)
    return {
        **GRANITE.from_gguf(fields, config),
        "intermediate_size": config.intermediate_size if experts is None else experts.shared_inner,
        "experts": experts,
        "unrotated_layers": () if turns else tuple(range(config.num_layers)),
        "recurrence": mamba2.from_gguf(fields, config, gguf_recurrent_layers(fields)),
    }


def _to_gguf(config: ModelConfig) -> Mapping[str, Any]:
    width = mamba2.spec_of(config).width
    if width != 2 * config.hidden_size:
        raise UnsupportedModelError(
            f"{config.name}: llama.cpp runs a Granite with layers of Mamba 2 that have twice the "
            f"{config.hidden_size} values of the stream, and this has {width}"
        )
    entries = {} if config.experts is None else moe.to_gguf(config)
    inner = config.intermediate_size if config.experts is None else config.experts.inner
    return {
        **GRANITE.to_gguf(config),
        **gguf_heads(config),
        **mamba2.to_gguf(config),
        **entries,
        "feed_forward_length": inner,
        "rope.scaling.finetuned": config.turns_positions,
    }


GRANITE_HYBRID = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    model=GraniteHybridForCausalLM,
    gguf="granitehybrid",
    gguf_interleaved=True,
    hf_names=HF_NAMES,
    gguf_names=_gguf_names(),
    written_gguf_names=_gguf_names,
    fused={
        **GRANITE_MOE.fused,
        _SHARED: ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    },
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_expand": 2,
        **mamba2.HF_DEFAULTS,
    },
    hf_ignored={
        "normalization_function": only("rmsnorm"),
        # Of experts, where no layer has any.
        "num_experts_per_tok": without("num_local_experts"),
        "intermediate_size": without("num_local_experts"),
        "time_step_min": always,
        "time_step_max": always,
        "time_step_floor": always,
        "time_step_limit": _is_no_limit,
        "layers_block_type": beside("layer_types"),
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=_from_gguf,
    to_gguf=_to_gguf,
)
