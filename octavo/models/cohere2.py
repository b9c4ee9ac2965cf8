"""Cohere 2 (Command R7B, Command A): both halves of a layer read the same norm, a LayerNorm without
a bias, and add to the stream side by side.

Three layers of four see a sliding window and turn neighbours by their position; the fourth sees all
and turns nothing. Logits are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import LayerNorm
from octavo.models.config import ModelConfig
from octavo.models.config_to_hf import shortest
from octavo.models.decoder import DecoderForCausalLM, make_attention
from octavo.models.family import Family
from octavo.models.ignored_keys import always, beside, only, same_as
from octavo.models.llama import GGUF_NAMES, HF_DEFAULTS
from octavo.models.sliding_windows import WindowPattern, Windows, hf_window_entries


class Cohere2DecoderLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        self.input_layernorm = LayerNorm(config.hidden_size, config.norm_eps, bias=False)
        self.self_attn = make_attention(config, index)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        normed = self.input_layernorm(x, ctx)
        x = ctx.ops.add(x, self.self_attn(normed, cos_sin, ctx))
        fed = self.mlp(normed, ctx)
        return ctx.ops.add(x, fed)


class Cohere2ForCausalLM(DecoderForCausalLM):
    layer_type = Cohere2DecoderLayer

    @staticmethod
    def make_norm(config: ModelConfig) -> Module:
        return LayerNorm(config.hidden_size, config.norm_eps, bias=False)


# -- files ----------------------------------------------------------------------------------------

_WINDOWS = WindowPattern(4)


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    period = fields.integer("sliding_window_pattern", _WINDOWS.period)
    windows = _WINDOWS.from_hf(fields, config, period)
    return {**_layers(windows), "logit_scale": fields.number("logit_scale")}


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    windows = _WINDOWS.from_gguf(fields, config)
    return {**_layers(windows), "logit_scale": fields.number("logit_scale")}


def _layers(windows: Windows) -> dict[str, Any]:
    """Rope is for what is near."""
    unrotated = tuple(i for i, window in enumerate(windows) if window is None)
    return {"layer_windows": windows, "unrotated_layers": unrotated}


def _logit_scale(config: ModelConfig) -> float:
    return shortest(1.0 if config.logit_scale is None else config.logit_scale)


COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    model=Cohere2ForCausalLM,
    gguf="cohere2",
    gguf_names=GGUF_NAMES,
    hf_fields={"rms_norm_eps": "layer_norm_eps"},
    gguf_fields={"attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon"},
    hf_interleaved=True,
    gguf_interleaved=True,
    hf_defaults={
        **{name: value for name, value in HF_DEFAULTS.items() if name != "rms_norm_eps"},
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    # What the first releases could do otherwise.
    hf_ignored={
        "order_of_interleaved_layers": only("local_attn_first"),
        "position_embedding_type": only("rope_gptj"),
        "rotary_pct": only(1.0),
        "layer_switch": same_as("sliding_window_pattern"),
        "use_embedding_sharing": only(True),
        "use_gated_activation": only(True),
        "use_parallel_block": only(True),
        "use_parallel_embedding": always,
        "use_qk_norm": only(False),
        "_sliding_window_pattern": beside("layer_types"),
        "no_rope_layers": only([]),
    },
    from_hf=_from_hf,
    to_hf=lambda config: {**hf_window_entries(config), "logit_scale": _logit_scale(config)},
    from_gguf=_from_gguf,
    to_gguf=lambda config: {
        **_WINDOWS.to_fixed_gguf(config),
        "logit_scale": _logit_scale(config),
    },
)
