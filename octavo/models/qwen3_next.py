"""Qwen3-Next: three layers of the gated delta rule to one that attends, and gates what it attends;
experts as in Qwen 2.

Only a part of each head is rotated, and weights of norms are stored less one, but for those of the
recurrent layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from octavo.errors import UnsupportedModelError
from octavo.fields import Fields
from octavo.kernels.recurrence_specs import ConvSpec, DeltaSpec, GatedNormSpec
from octavo.layers.gated_attention import GatedAttention
from octavo.layers.module import Module
from octavo.layers.recurrence_config import RecurrenceConfig
from octavo.layers.recurrent import GatedDeltaNet
from octavo.models.config import ExpertsConfig, ModelConfig
from octavo.models.decoder import DecoderForCausalLM, make_attention
from octavo.models.experts import hf_experts
from octavo.models.family import Family, HFNames
from octavo.models.hybrid import HybridDecoderLayer, hf_layers_of, mixer_names
from octavo.models.qwen_moe import SHARED_EXPERT, expert_layers

_PERIOD = 4  # of which the last layer attends


class Qwen3NextDecoderLayer(HybridDecoderLayer):
    mixer_type = GatedDeltaNet

    def make_attention(self, config: ModelConfig, index: int) -> Module:
        eps = config.norm_eps
        return make_attention(config, index, GatedAttention, qk_norm_eps=eps, qk_norm_plus=1.0)


class Qwen3NextForCausalLM(DecoderForCausalLM):
    layer_type = Qwen3NextDecoderLayer


# -- files ----------------------------------------------------------------------------------------

MIXER = ("in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj")
HF_NAMES = HFNames(layer={**SHARED_EXPERT, **mixer_names("linear_attn", MIXER)})


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    if "layer_types" in fields:
        layers = hf_layers_of(fields, config.num_layers, ("linear_attention",))
    else:
        period = fields.integer("full_attention_interval", _PERIOD)
        layers = tuple(i for i in range(config.num_layers) if (i + 1) % period)
    return {
        "norm_plus_one": True,
        "qk_norm": True,
        "experts": _experts(fields, config),
        "recurrence": _recurrence(fields, layers, config.norm_eps),
    }


def _recurrence(fields: Fields, layers: tuple[int, ...], eps: float) -> RecurrenceConfig:
    delta = DeltaSpec(
        key_heads=fields.integer("linear_num_key_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_heads=fields.integer("linear_num_value_heads"),
        value_dim=fields.integer("linear_value_head_dim"),
    )
    kernel = fields.integer("linear_conv_kernel_dim", minimum=2)
    return RecurrenceConfig(
        layers=layers,
        conv=ConvSpec(channels=delta.channels, kernel=kernel),
        delta=delta,
        norm=GatedNormSpec(width=delta.width, group=delta.value_dim, eps=eps, first=delta.channels),
    )


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig | None:
    layers = expert_layers(fields, config)
    if not any(layers) or not fields.integer("num_experts", minimum=0):
        return None
    return hf_experts(
        fields,
        config,
        layers=layers,
        routing={"normalize": fields.boolean("norm_topk_prob")},
        shared_inner=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _row_order(config: ModelConfig, parameter: str) -> np.ndarray | None:
    """Rows of projections, which in files lie head by head, as those of all heads of each kind."""
    if parameter.endswith(("self_attn.q_proj.weight", "self_attn.q_proj.bias")):
        return _by_kind(config.num_heads, (config.head_dim, config.head_dim))
    assert config.recurrence is not None and config.recurrence.delta is not None
    delta = config.recurrence.delta
    repeats = delta.value_heads // delta.key_heads
    if parameter.endswith("mixer.in_proj_qkvz.weight"):
        values = repeats * delta.value_dim
        return _by_kind(delta.key_heads, (delta.key_dim, delta.key_dim, values, values))
    if parameter.endswith("mixer.in_proj_ba.weight"):
        return _by_kind(delta.key_heads, (repeats, repeats))
    return None


def _by_kind(num_heads: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Rows that lie as [head, kind, size], as [kind, head, size]."""
    rows = np.arange(num_heads * sum(sizes)).reshape(num_heads, -1)
    kinds = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([kind.reshape(-1) for kind in kinds])


def _to_hf(config: ModelConfig) -> NoReturn:
    raise UnsupportedModelError(
        f"{config.name}: folders of a {config.architecture} have rows of projections in another "
        "order, in which octavo does not write them"
    )


QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    model=Qwen3NextForCausalLM,
    hf_names=HF_NAMES,
    fused={"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")},
    row_order=_row_order,
    norm_plus_one=True,
    hf_defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32_768,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
)
