"""Falcon-H1: attention and Mamba 2 side by side in every layer (arXiv 2507.22448).

Everything is scaled by some number of its config, so that one recipe trains all sizes. Where two of
them are multiplied with each other, the config here has their product: those of keys and of what
attention reads are in ``attention_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isclose
from typing import TYPE_CHECKING, Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrence_config import RecurrenceConfig
from octavo.layers.recurrent import Mamba2
from octavo.models import mamba2
from octavo.models.config import ModelConfig, Multipliers
from octavo.models.config_to_hf import shortest
from octavo.models.decoder import DecoderForCausalLM, add_scaled, make_attention, make_mlp
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.granite import unless_one
from octavo.models.ignored_keys import always, only, without
from octavo.models.llama import GGUF_LAYER, GGUF_TOP, HF_DEFAULTS

if TYPE_CHECKING:
    import numpy as np


class FalconH1DecoderLayer(Module):
    """The MLP's gate scale is folded into the norm before it, and divided out of the part behind
    it."""

    def __init__(self, config: ModelConfig, index: int):
        assert config.recurrence is not None
        scales = config.multipliers
        self.attention_scale = unless_one(scales.attention)
        self.mixer_scale = unless_one(scales.recurrence)
        self.mlp_scale = unless_one(scales.mlp / scales.gate)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = make_attention(config, index)
        self.mixer = Mamba2(index, config.hidden_size, config.recurrence)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.norm_eps, times=scales.gate
        )
        self.mlp = make_mlp(config, index)

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        normed = self.input_layernorm(x, ctx)
        attended, mixed = self.self_attn(normed, cos_sin, ctx), self.mixer(normed, ctx)
        x = add_scaled(x, attended, self.attention_scale, ctx)
        x = add_scaled(x, mixed, self.mixer_scale, ctx)
        fed = self.mlp(self.post_attention_layernorm(x, ctx), ctx)
        return add_scaled(x, fed, self.mlp_scale, ctx)


class FalconH1ForCausalLM(DecoderForCausalLM):
    layer_type = FalconH1DecoderLayer


# -- files ----------------------------------------------------------------------------------------

HF_NAMES = HFNames(
    {"model.final_layernorm": "model.norm"},
    {
        "pre_ff_layernorm": "post_attention_layernorm",
        "feed_forward.gate_proj": "mlp.gate_proj",
        "feed_forward.up_proj": "mlp.up_proj",
        "feed_forward.down_proj": "mlp.down_proj",
        **mamba2.HF_LAYER,
    },
)


def _gguf_names(config: ModelConfig | None = None) -> TensorNames:
    groups = 1 if config is None else mamba2.spec_of(config).groups
    layer = {**GGUF_LAYER, **mamba2.GGUF_LAYER, "ffn_norm": "post_attention_layernorm.weight"}
    return TensorNames(GGUF_TOP, layer, values=mamba2.gguf_values(groups))


_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    _refuse_biases(fields, config)
    read, key = fields.number("attention_in_multiplier"), fields.number("key_multiplier")
    gate, mlp = fields.each("mlp_multipliers", Fields.number, 2)
    return {
        "embedding_scale": unless_one(fields.number("embedding_multiplier")),
        "logit_scale": unless_one(fields.number("lm_head_multiplier")),
        "attention_scale": config.attention_scale * key * read**2,
        "multipliers": Multipliers(
            attention=fields.number("attention_out_multiplier") * read,
            recurrence=fields.number("ssm_out_multiplier"),
            mlp=mlp,
            gate=gate,
        ),
        "recurrence": _recurrence(fields, config),
    }


def _recurrence(fields: Fields, config: ModelConfig) -> RecurrenceConfig:
    inner = fields.integer("mamba_d_ssm", None)
    if inner is None:
        inner = fields.integer("mamba_expand") * config.hidden_size
    normed = fields.boolean("mamba_rms_norm")
    if normed and fields.boolean("mamba_norm_before_gate"):
        raise UnsupportedModelError(f"{fields.path}: a norm of Mamba 2 before its gate")
    layers = tuple(range(config.num_layers))
    found = mamba2.from_hf(fields, config, layers, inner, normed=normed)
    read = fields.number("ssm_in_multiplier")
    gate, *convolved, step = (
        read * each for each in fields.each("ssm_multipliers", Fields.number, 5)
    )
    least, most = fields.each("time_step_limit", _step_limit, 2)
    assert found.mamba is not None and found.norm is not None
    return replace(
        found,
        parallel=True,
        mamba_scales=tuple(convolved),
        mamba=replace(
            found.mamba, step_scale=step, step_min=least, step_max=None if most == inf else most
        ),
        norm=replace(found.norm, gate_scale=gate),
    )


def _step_limit(fields: Fields, name: str) -> float:
    if fields.raw(name) in (inf, _INFINITY):
        return inf
    return float(fields.number(name, above=-1.0))


def _refuse_biases(fields: Fields, config: ModelConfig) -> None:
    """Raise UnsupportedModelError for biases whose scale is not that of their weights, which a GGUF
    file cannot say. No published model has any."""
    scaled = (
        config.attention_bias and fields.number("attention_in_multiplier") != 1,
        config.mlp_bias and fields.each("mlp_multipliers", Fields.number, 2)[0] != 1,
        fields.boolean("mamba_proj_bias") and fields.number("ssm_in_multiplier") != 1,
        fields.boolean("mamba_proj_bias") != fields.boolean("projectors_bias"),
    )
    if any(scaled):
        raise UnsupportedModelError(
            f"{fields.path}: a Falcon-H1 with biases that are scaled otherwise than its weights"
        )


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    recurrence, mamba, scales = config.recurrence, mamba2.spec_of(config), config.multipliers
    assert recurrence is not None and recurrence.norm is not None
    norm = recurrence.norm
    projected = (norm.gate_scale, *recurrence.mamba_scales, mamba.step_scale)
    return {
        **mamba2.to_hf(config),
        "mamba_d_ssm": mamba.width,
        "mamba_rms_norm": norm.normed,
        "mamba_norm_before_gate": False,
        "projectors_bias": recurrence.proj_bias,
        "time_step_limit": [
            mamba.step_min,
            _INFINITY if mamba.step_max is None else mamba.step_max,
        ],
        "embedding_multiplier": shortest(config.embedding_scale or 1.0),
        "lm_head_multiplier": shortest(config.logit_scale or 1.0),
        "attention_in_multiplier": 1.0,
        "key_multiplier": config.attention_scale * config.head_dim**0.5,
        "attention_out_multiplier": scales.attention,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": list(projected),
        "ssm_out_multiplier": scales.recurrence,
        "mlp_multipliers": [scales.gate, scales.mlp],
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    found = mamba2.from_gguf(fields, config, tuple(range(config.num_layers)))
    return {"recurrence": replace(found, parallel=True)}


def _gguf_factors(config: ModelConfig, parameter: str) -> np.ndarray | None:
    """Factors of all scaled parameters; a GGUF file has no place for them but its weights."""
    scales, module = config.multipliers, parameter.removesuffix(".weight").rpartition(".")[2]
    if module == "in_proj":
        return _projected_scales(config)
    by_module = {
        "embed_tokens": config.embedding_scale or 1.0,
        "lm_head": config.logit_scale or 1.0,
        "k_proj": config.attention_scale * config.head_dim**0.5,
        "o_proj": scales.attention,
        "out_proj": scales.recurrence,
        "gate_proj": scales.gate,
        "down_proj": scales.mlp,
    }
    factor = by_module.get(module, 1.0)
    if isclose(factor, 1.0, rel_tol=1e-6):
        return None
    import numpy as np

    return np.array([factor])


def _projected_scales(config: ModelConfig) -> np.ndarray | None:
    """The factors of the outputs of Mamba's first projection, in its order."""
    recurrence, mamba = config.recurrence, mamba2.spec_of(config)
    assert recurrence is not None and recurrence.norm is not None
    import numpy as np

    gate = np.repeat(recurrence.norm.gate_scale, mamba.width)
    steps = np.repeat(mamba.step_scale, mamba.heads)
    factors = np.concatenate([gate, recurrence.channel_scales, steps])
    return None if (factors == 1).all() else factors


def _without_factors(config: ModelConfig) -> ModelConfig:
    recurrence, mamba = config.recurrence, mamba2.spec_of(config)
    assert recurrence is not None and recurrence.norm is not None
    if config.tie_embeddings and config.embedding_scale != config.logit_scale:
        raise UnsupportedModelError(
            f"{config.name}: one matrix is embedding and head, which are scaled otherwise: a GGUF "
            "file, in which scales are multiplied into weights, would need two"
        )
    return replace(
        config,
        embedding_scale=None,
        logit_scale=None,
        attention_scale=config.head_dim**-0.5,
        multipliers=Multipliers(),
        recurrence=replace(
            recurrence,
            mamba_scales=(1.0, 1.0, 1.0),
            mamba=replace(mamba, step_scale=1.0),
            norm=replace(recurrence.norm, gate_scale=1.0),
        ),
    )


FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    model=FalconH1ForCausalLM,
    gguf="falcon-h1",
    hf_names=HF_NAMES,
    gguf_names=_gguf_names(),
    written_gguf_names=_gguf_names,
    gguf_factors=_gguf_factors,
    gguf_config=_without_factors,
    hf_defaults={
        **HF_DEFAULTS,
        **mamba2.HF_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_expand": 2,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "projectors_bias": False,
        "time_step_limit": [0.0, inf],
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "key_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    },
    hf_ignored={
        "mamba_use_mlp": only(True),
        "mlp_expansion_factor": always,
        "attn_layer_indices": only([]),
        "time_step_min": always,
        "time_step_max": always,
        "time_step_floor": always,
        "mamba_norm_before_gate": without("mamba_rms_norm"),
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=_from_gguf,
    to_gguf=mamba2.to_gguf,
)
