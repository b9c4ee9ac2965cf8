"""Qwen3-Next: three layers of the gated delta rule to one that attends, and gates what it attends;
experts as in Qwen 2.

Only a part of each head is rotated, and weights of norms are stored less one, but for those of the
recurrent layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.kernels.recurrence_specs import ConvSpec, DeltaSpec, GatedNormSpec
from octavo.layers.gated_attention import GatedAttention
from octavo.layers.module import Module
from octavo.layers.recurrence_config import RecurrenceConfig
from octavo.layers.recurrent import GatedDeltaNet
from octavo.models import experts as moe
from octavo.models import hybrid, mamba2
from octavo.models.config import ExpertsConfig, ModelConfig
from octavo.models.decoder import DecoderForCausalLM, make_attention
from octavo.models.family import Family, FileValues, HFNames, TensorNames
from octavo.models.llama import GGUF_LAYER, GGUF_TOP
from octavo.models.qwen_moe import (
    SHARED_EXPERT,
    expert_layers,
    qwen_expert_entries,
    qwen_experts,
)

if TYPE_CHECKING:
    import numpy as np

_PERIOD = 4  # of which the last layer attends


class Qwen3NextDecoderLayer(hybrid.HybridDecoderLayer):
    mixer_type = GatedDeltaNet

    def make_attention(self, config: ModelConfig, index: int) -> Module:
        return make_attention(
            config,
            index,
            GatedAttention,
            qk_norm_eps=config.norm_eps,
            qk_norm_plus=float(config.norm_plus_one),
        )


class Qwen3NextForCausalLM(DecoderForCausalLM):
    layer_type = Qwen3NextDecoderLayer


# -- files ----------------------------------------------------------------------------------------

MIXER = ("in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj")
HF_NAMES = HFNames(layer={**SHARED_EXPERT, **hybrid.mixer_names("linear_attn", MIXER)})


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    if "layer_types" in fields:
        layers = hybrid.hf_layers_of(fields, config.num_layers, ("linear_attention",))
    else:
        layers = _all_but_last_of(fields.integer(_INTERVAL, _PERIOD), config.num_layers)
    delta = DeltaSpec(
        key_heads=fields.integer("linear_num_key_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_heads=fields.integer("linear_num_value_heads"),
        value_dim=fields.integer("linear_value_head_dim"),
    )
    kernel = fields.integer("linear_conv_kernel_dim", minimum=2)
    return {
        "norm_plus_one": True,
        "qk_norm": True,
        "experts": _experts(fields, config),
        "recurrence": _recurrence(delta, kernel, layers, config.norm_eps),
    }


def _all_but_last_of(period: int, num_layers: int) -> tuple[int, ...]:
    return tuple(index for index in range(num_layers) if (index + 1) % period)


def _recurrence(
    delta: DeltaSpec, kernel: int, layers: tuple[int, ...], eps: float
) -> RecurrenceConfig:
    return RecurrenceConfig(
        layers=layers,
        conv=ConvSpec(channels=delta.channels, kernel=kernel),
        delta=delta,
        norm=GatedNormSpec(width=delta.width, group=delta.value_dim, eps=eps),
    )


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig | None:
    if not any(expert_layers(fields, config)) or not fields.integer("num_experts", minimum=0):
        return None
    return qwen_experts(fields, config, shared=True)


def _row_order(config: ModelConfig, parameter: str) -> np.ndarray | None:
    """Rows of projections, which in files lie head by head, as those of all heads of each kind."""
    if parameter.endswith(("self_attn.q_proj.weight", "self_attn.q_proj.bias")):
        return _by_kind(config.num_heads, (config.head_dim, config.head_dim))
    delta = _delta_of(config)
    repeats = delta.value_heads // delta.key_heads
    if parameter.endswith("mixer.in_proj_qkvz.weight"):
        values = repeats * delta.value_dim
        return _by_kind(delta.key_heads, (delta.key_dim, delta.key_dim, values, values))
    if parameter.endswith("mixer.in_proj_ba.weight"):
        return _by_kind(delta.key_heads, (repeats, repeats))
    return None


def _by_kind(num_heads: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Rows that lie as [head, kind, size], as [kind, head, size]."""
    import numpy as np

    rows = np.arange(num_heads * sum(sizes)).reshape(num_heads, -1)
    kinds = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([kind.reshape(-1) for kind in kinds])


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    delta = _delta_of(config)
    assert config.recurrence is not None
    return {
        "layer_types": hybrid.hf_layer_types(config, "linear_attention"),
        "linear_num_key_heads": delta.key_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_num_value_heads": delta.value_heads,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": config.recurrence.conv.kernel,
        **_expert_entries(config),
    }


def _expert_entries(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {"num_experts": 0, "mlp_only_layers": list(range(config.num_layers))}
    return qwen_expert_entries(config)


def _delta_of(config: ModelConfig) -> DeltaSpec:
    assert config.recurrence is not None and config.recurrence.delta is not None
    return config.recurrence.delta


# -- GGUF -----------------------------------------------------------------------------------------

_QUERIES_AND_GATES = {"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")}
_INTERVAL = "full_attention_interval"
GGUF_NAMES = TensorNames(
    GGUF_TOP,
    {
        **GGUF_LAYER,
        **moe.GGUF_LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "mixer.in_proj_qkv",
        "attn_gate": "mixer.in_proj_z",
        "ssm_ba": "mixer.in_proj_ba",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_dt.bias": "mixer.dt_bias",
        "ssm_a": "mixer.A_log",
        "ssm_norm": "mixer.norm",
        "ssm_out": "mixer.out_proj",
    },
    fused=_QUERIES_AND_GATES,
    values={
        "mixer.conv1d.weight": hybrid.GGUF_CONV,
        "mixer.A_log": FileValues(mamba2.log_decays, mamba2.decays),
    },
)


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    if "attention.recurrent_layers" in fields:
        recurrent = fields.each("attention.recurrent_layers", Fields.boolean)
        layers = tuple(index for index, each in enumerate(recurrent) if each)
    else:
        layers = _all_but_last_of(fields.integer(_INTERVAL, _PERIOD), config.num_layers)
    heads, size = fields.integer("ssm.time_step_rank"), fields.integer("ssm.state_size")
    delta = DeltaSpec(
        key_heads=fields.integer("ssm.group_count"),
        key_dim=size,
        value_heads=heads,
        value_dim=fields.integer("ssm.inner_size") // heads,
    )
    kernel = fields.integer("ssm.conv_kernel", minimum=2)
    return {
        "qk_norm": True,
        "experts": moe.from_gguf(fields, config, normalize=True, shared_gate=True),
        "recurrence": _recurrence(delta, kernel, layers, config.norm_eps),
    }


def _to_gguf(config: ModelConfig) -> Mapping[str, Any]:
    import numpy as np

    delta = _delta_of(config)
    if config.experts is None or delta.key_dim != delta.value_dim:
        raise UnsupportedModelError(
            f"{config.name}: llama.cpp runs a Qwen3-Next with experts, and with keys and values of "
            "one size in recurrent layers"
        )
    assert config.recurrence is not None
    recurrent = [not config.attends(layer) for layer in range(config.num_layers)]
    return {
        **moe.to_gguf(config),
        "ssm.conv_kernel": config.recurrence.conv.kernel,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.width,
        "attention.recurrent_layers": np.array(recurrent),
    }


QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    model=Qwen3NextForCausalLM,
    hf_names=HF_NAMES,
    gguf="qwen3next",
    gguf_names=GGUF_NAMES,
    fused={
        **_QUERIES_AND_GATES,
        "mixer.in_proj_qkvz": ("mixer.in_proj_qkv", "mixer.in_proj_z"),
    },
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
    from_gguf=_from_gguf,
    to_gguf=_to_gguf,
)
