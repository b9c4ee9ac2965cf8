"""Granite 4 hybrid: nine layers of Mamba 2 to one that attends, most of them without positions, and
the scales of Granite 3. All have an MLP, and larger models experts beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.fields import Fields
from octavo.kernels.recurrence_specs import ConvSpec, GatedNormSpec, ScanSpec
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.recurrence_config import RecurrenceConfig
from octavo.layers.recurrent import Mamba2
from octavo.models.config import ExpertsConfig, ModelConfig
from octavo.models.decoder import DecoderForCausalLM, make_mlp
from octavo.models.experts import hf_expert_entries, hf_experts
from octavo.models.family import Family, HFNames
from octavo.models.granite import GRANITE, GRANITE_MOE, MOE_NAMES
from octavo.models.hybrid import HybridDecoderLayer, hf_layer_types, hf_layers_of, mixer_names
from octavo.models.llama import HF_DEFAULTS


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
        **mixer_names("mamba", ("in_proj", "conv1d", "norm", "out_proj")),
    }
)
_RECURRENT = {"mamba", "linear_attention"}  # of transformers 4, and of 5
_ATTENDING = {"attention", "full_attention"}


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    layers = hf_layers_of(fields, config.num_layers, _RECURRENT, _ATTENDING, name)
    turns = fields.text("position_embedding_type", None) == "rope"
    return {
        **GRANITE.from_hf(fields, config),
        "intermediate_size": fields.integer("shared_intermediate_size"),
        "experts": _experts(fields, config),
        "unrotated_layers": () if turns else tuple(range(config.num_layers)),
        "recurrence": _recurrence(fields, config, layers),
    }


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig | None:
    if not fields.integer("num_local_experts", minimum=0):
        return None
    shared = fields.integer("shared_intermediate_size")
    return hf_experts(fields, config, inner="intermediate_size", shared_inner=shared)


def _recurrence(fields: Fields, config: ModelConfig, layers: tuple[int, ...]) -> RecurrenceConfig:
    inner = fields.integer("mamba_expand") * config.hidden_size
    heads = fields.integer("mamba_n_heads")
    is_auto = fields.raw("mamba_d_head", "auto") == "auto"
    size = inner // heads if is_auto else fields.integer("mamba_d_head")
    if heads * size != inner:
        raise fields.error("mamba_n_heads", f"{heads} heads of {size} values are not {inner}")
    groups, dim = fields.integer("mamba_n_groups"), fields.integer("mamba_d_state")
    channels = inner + 2 * groups * dim
    return RecurrenceConfig(
        layers=layers,
        conv=ConvSpec(
            channels=channels, kernel=fields.integer("mamba_d_conv", minimum=2), first=inner
        ),
        mamba=ScanSpec(
            heads=heads, head_dim=size, groups=groups, state_dim=dim, first=inner + channels
        ),
        norm=GatedNormSpec(
            width=inner, group=inner // groups, eps=config.norm_eps, gate_first=True
        ),
        conv_bias=fields.boolean("mamba_conv_bias"),
        proj_bias=fields.boolean("mamba_proj_bias"),
    )


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    recurrence = config.recurrence
    assert recurrence is not None and recurrence.mamba is not None
    mamba = recurrence.mamba
    experts: Mapping[str, Any] = {"num_local_experts": 0}
    if config.experts is not None:
        experts = hf_expert_entries(config, "num_local_experts")
    return {
        **GRANITE.to_hf(config),
        **experts,
        "layer_types": hf_layer_types(config, "mamba", "attention"),
        "shared_intermediate_size": config.intermediate_size,
        "position_embedding_type": "rope" if config.turns_positions else "nope",
        "mamba_expand": mamba.width // config.hidden_size,
        "mamba_n_heads": mamba.heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.groups,
        "mamba_d_state": mamba.state_dim,
        "mamba_d_conv": recurrence.conv.kernel,
        "mamba_conv_bias": recurrence.conv_bias,
        "mamba_proj_bias": recurrence.proj_bias,
    }


GRANITE_HYBRID = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    model=GraniteHybridForCausalLM,
    hf_names=HF_NAMES,
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
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
)
