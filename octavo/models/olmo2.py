"""OLMo 2 and 3: norms stand behind both halves of a layer and before neither, and those of queries
and keys are over all heads of a token.

In OLMo 3, three layers of four see a sliding window; these turn positions without rope's scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import ModelConfig
from octavo.models.decoder import DecoderForCausalLM, make_attention
from octavo.models.family import Family, TensorNames
from octavo.models.llama import GGUF_LAYER, GGUF_TOP, HF_DEFAULTS
from octavo.models.sliding_windows import WindowPattern, hf_window_entries


class Olmo2DecoderLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        self.self_attn = make_attention(
            config, index, qk_norm_eps=config.norm_eps, whole_qk_norm=True
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.self_attn(x, cos_sin, ctx)
        x = ctx.ops.add(x, self.post_attention_layernorm(attended, ctx))
        fed = self.mlp(x, ctx)
        return ctx.ops.add(x, self.post_feedforward_layernorm(fed, ctx))


class Olmo2ForCausalLM(DecoderForCausalLM):
    layer_type = Olmo2DecoderLayer


# -- files ----------------------------------------------------------------------------------------

_GGUF_NAMES = TensorNames(
    GGUF_TOP,
    {
        **{theirs: ours for theirs, ours in GGUF_LAYER.items() if not ours.endswith("layernorm")},
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
_WINDOWS = WindowPattern(4)
_DEFAULTS = {**HF_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    windows = _WINDOWS.from_hf(fields, config)
    # Configs of transformers 5 have a rope for each kind of layer; older ones say it of all.
    local_rope = config.local_rope or _unscaled(config)
    return {
        "qk_norm": True,
        "layer_windows": windows,
        "local_rope": local_rope if any(windows) else None,
    }


def _from_gguf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    if not any(config.layer_windows):
        return {}
    return {
        "architecture": "Olmo3ForCausalLM",
        "layer_windows": _WINDOWS.from_gguf(fields, config),
        "local_rope": _unscaled(config),
    }


def _unscaled(config: ModelConfig) -> RopeConfig | None:
    return None if config.rope.scaling == "default" else config.rope.unscaled()


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    model=Olmo2ForCausalLM,
    gguf="olmo2",
    gguf_names=_GGUF_NAMES,
    gguf_needs_head=True,
    hf_defaults=_DEFAULTS,
    from_hf=lambda fields, config: {"qk_norm": True},
    from_gguf=_from_gguf,
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    hf_defaults={**_DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096},
    from_hf=_from_hf,
    to_hf=hf_window_entries,
    to_gguf=_WINDOWS.to_fixed_gguf,
)
